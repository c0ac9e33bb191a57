"""Tensor parallelism, pipelines and the head: cuts of the model."""

from tests.proof.bugs.bug import Bug, Seen

TENSOR, PIPELINE, TIE, LOSS = "parallel/tensor.py", "parallel/pipeline.py", "parallel/tie.py", "model/head/loss.py"
CUT, DDP, DECODER = "parallel/cut.py", "parallel/ddp.py", "model/transformer.py"
TP2, PP2 = ("parallel.tp=2", "parallel.shard=1"), ("parallel.pp=2", "parallel.shard=1")

# fmt: off
# ruff: noqa: E501  texts of the source, whole lines of it
MODEL_PARALLEL = {
    "shared gradients left apart": Bug(
        "torchtitan #1750 and Megatron-LM #673: norms see a part of the sequence and are not summed over tp",
        ((CUT, "    return parameter.to_local(grad_placements=[Partial()])", "    return parameter.to_local()"),),
        ("exact: qwen3 tied: tp2 micro8", "exact: gpt2 tied heads4: tp2 shard2"),
        Seen(TP2, "OutOfSync", "model.model.layers.0.self_attn.q_norm.weight differs between ranks 0 and 1 after step 1"),
    ),
    "gathered gradients left apart": Bug(
        "backward of a gather keeps this rank's own part in place of the sum",
        ((CUT, "return x_BTD.to_local(grad_placements=[Partial()])", "return x_BTD.to_local(grad_placements=[Replicate()])"),),
        ("exact: qwen3 tied: tp2 micro8",),
    ),
    "a row bias on every tensor rank": Bug(
        "Megatron-LM #7452: a bias added before the reduction, once per rank",
        ((TENSOR, "return out_BSD if self.bias is None else out_BSD + shared(self.bias)",
          "return out_BSD if self.bias is None else out_BSD + self.mesh.size() * shared(self.bias)"),),
        ("exact: gpt2 tied heads4: tp2 micro8",),
        Seen(TP2, "residual stream", "layer 0 (model.layers.0)", "gpt2"),
    ),
    "softmax over a rank's own rows": Bug(
        "the largest logit and the total are those of this rank's part of the vocabulary",
        ((TENSOR, "rows = Cut(self.mesh.get_group(), ", "rows = Cut(None, "),),
        ("exact: qwen3 tied: tp2 micro8",),
    ),
    "targets taken for a rank's own rows": Bug(
        "vocabulary-parallel cross-entropy with targets not moved by the first row (torchtitan #1750, open)",
        ((TENSOR, "self.mesh.get_local_rank() * weight_VD.shape[0])\n        form", "0)\n        form"),),
        ("exact: qwen3 tied: tp2 micro8",),
        Seen(TP2, "loss", "step 1"),
    ),
    "a lookup without a mask": Bug(
        "every tensor rank looks every token up among its own rows",
        ((TENSOR, "return scatter(part_BTD.where(here_BT[:, :, None], 0), self.mesh)", "return scatter(part_BTD, self.mesh)"),),
        ("exact: qwen3 tied: tp2 micro8",),
    ),
    "the first head of keys for all": Bug(
        "two heads of keys and values over four ranks: ranks 2 and 3 read the first one too",
        ((TENSOR, "first = mesh.get_local_rank() * num_heads // mesh.size() * size", "first = 0 * size"),),
        ("exact: qwen3 tied: tp4 micro8",),
    ),
    "gradients of a shared head left apart": Bug(
        "ranks that read the same head of keys see their own queries: the parts of its gradient are not summed",
        ((TENSOR, "return shared(parameter)[self.rows]", "return own(parameter)[self.rows]"),),
        ("exact: qwen3 tied: tp4 micro8",),
    ),
    "data sliced by the global rank": Bug(
        "verl #4250 and others: ranks that compute one sample together read different ones",
        (("parallel/mesh.py", 'return self.coordinate["replicate"] * self.layout.shard + self.coordinate["shard"]',
          "return dist.get_rank() % self.layout.batch_ranks"),),
        ("exact: qwen3 tied: tp2 shard2", "exact: qwen3 tied: context2 shard2 allgather"),
        Seen(("parallel.tp=2", "parallel.shard=2"), "samples", "are not those of its model-parallel group"),
    ),
    "parts of norms' gradients not summed": Bug(
        "what every tensor rank holds whole keeps this rank's part where DDP sums replicas",
        ((DDP, "gradient.redistribute(placements=parameter.placements)",
          "DTensor.from_local(gradient.to_local(), parameter.device_mesh, parameter.placements)"),),
        ("exact: qwen3 tied: tp2 zero0 replicate2",),
    ),
    "replicas are not summed beside a pipeline": Bug(
        "torchtitan #596: data-parallel gradients dropped where backward is cut in two",
        ((DDP, "    if mesh.loss_group.size() > 1:", "    if mesh.loss_group.size() > 99:"),),
        ("exact: qwen3 tied: tp2 zero0 replicate2", "exact: qwen3 tied blocks5: pp2 zbv zero0 replicate2",
         "exact: qwen3 tied blocks5: pp2 zbv zero0 replicate2 fp32"),
        Seen(("parallel.pp=2", "parallel.zero=0", "parallel.replicate=2"), "OutOfSync",
             "model.model.embed_tokens.weight differs between ranks 0 and 1 after step 1"),
    ),
    "tensor ranks draw alike": Bug(
        "ms-swift PR 7944: one seed on all tensor ranks, so that their parts of a matrix are copies",
        (("model/init.py", "        ranges = owned_ranges(parameter)\n",
          "        ranges = [range(len(one)) for one in owned_ranges(parameter)]\n"),),
        verify=Seen(TP2, "drawn weights", "_proj.weight["), mistake="weights_by_rank",
    ),
    "scaled by the pipeline's micro-batches": Bug(
        "torch.distributed.pipelining's default; torchtitan #2972: gradients too small by a count",
        ((PIPELINE, "scale_grads=False)", "scale_grads=True)"),),
        ("exact: qwen3 tied blocks5: pp2 gpipe", "exact: qwen3 tied blocks5: pp2 zbv", "exact: qwen3 tied blocks5: pp2 zbv fp32",
         "exact: qwen3 tied blocks5: pp2 gpipe fp32"),
        Seen(PP2, "gradients", "model.embed_tokens.weight"),
    ),
    "a half of backward that FSDP does not hear of": Bug(
        "torch's zero-bubble schedules: gradients of weights that no hook sees are not sent",
        ((PIPELINE, '            sender.after_weights(kwargs["last_backward"])\n', ""),),
        ("exact: qwen3 tied blocks5: pp2 zbv shard2",), said="BadLayout",
    ),
    "untied ends": Bug(
        "Megatron-LM #7452 (several): tied embedding, its ends on two stages, trained apart",
        ((TIE, "            gradient.add_(given)\n", "            pass\n"),),
        ("exact: qwen3 tied blocks5: pp2 1f1b", "exact: qwen3 tied blocks5: pp2 zbv", "exact: qwen3 tied blocks5: pp2 1f1b fp32",
         "exact: qwen3 tied blocks5: pp2 zbv fp32"),
        Seen(PP2, "gradients", "model.embed_tokens.weight"),
    ),
    "a tied head not renewed": Bug(
        "the head on the last stage keeps its first weights",
        ((TIE, '"""The embedding\'s values, into its mirror."""\n', '"""The embedding\'s values, into its mirror."""\n        return\n'),),
        ("exact: qwen3 tied blocks5: pp2 zbv", "exact: qwen3 tied blocks5: pp2 1f1b shard2",
         "exact: qwen3 tied blocks5: pp2 1f1b shard2 fp32", "exact: qwen3 tied blocks5: pp2 zbv fp32"), steps=2,
    ),
    "tied head counted twice in the norm": Bug(
        "Megatron-LM #7452: a shared parameter's copy in the global norm",
        ((PIPELINE, " for name, p in named if p is not mirror]", " for name, p in named]"),
         (TIE, "            self.head_sum.grad = None\n", "            pass\n")),
        ("exact: qwen3 tied blocks5: pp2 1f1b", "exact: qwen3 tied blocks5: pp2 1f1b fp32"),
        Seen(PP2, "gradient norm", "step 1 on rank 0"),
    ),
    "norm of a pipeline's own stage": Bug(
        "torchtune #2420, Megatron-LM PR 5916: the norm leaves out other ranks' parameters",
        (("optim/clip.py", "    if pp_group.size() > 1:", "    if pp_group.size() > 99:"),),
        ("exact: qwen3 tied blocks5: pp2 1f1b",),
        Seen(PP2, "gradient norm", "step 1 on rank 0"),
    ),
    "a layer of a later stage does not rotate": Bug(
        "a reviewer: a forward that is wrong in one layer was named by the loss alone",
        ((DECODER, "turned = None if int(index) in self.arch.unrotated_layers else rope",
          "turned = None if int(index) == 1 else rope"),),
        ("exact: qwen3 tied blocks5: pp2 1f1b",),
        Seen(PP2, "residual stream", "layer 1 (model.layers.1)", "two_layers"),
    ),
    "a layer of a tensor rank does not rotate": Bug(
        "a reviewer: as above",
        ((DECODER, "turned = None if int(index) in self.arch.unrotated_layers else rope",
          "turned = None if int(index) == 1 else rope"),),
        ("exact: qwen3 tied: tp2 micro8",),
        Seen(TP2, "residual stream", "layer 1 (model.layers.1)", "two_layers"),
    ),
    "a later step divided by the first one's count": Bug(
        "a reviewer: a count that is kept",
        ((PIPELINE, "factor = self._factor(count)",
          'factor = self._factor(self.__dict__.setdefault("_first_count", count))'),),
        ("exact: qwen3 tied blocks5: pp2 1f1b",),
        Seen(PP2, "loss of later steps", "step 2"), steps=2,
    ),
    "padded rows of the vocabulary count": Bug(
        "softmax runs over all rows in memory",
        ((LOSS, "logits_CV[:, max(0, form.vocab_size - form.cut.first_row) :] = -torch.inf", "pass"),),
        ("padded: gpt2 tied: zero2 shard2", "padded: gpt2 tied: one micro8", "exact: gpt2 tied: zero2 shard2",
         "padded: gpt2 tied: zero2 shard2 fp32", "exact: gpt2 tied: one micro8 fp32", "exact: gpt2 tied: one micro8",
         "padded: gpt2 tied: one micro8 fp32", "exact: gpt2 tied: zero2 shard2 fp32"),
    ),
    "padded rows of the vocabulary in the loss": Bug(
        "a reviewer: rows masked by the whole vocabulary's number on a rank's own rows",
        ((LOSS, "logits_CV[:, max(0, form.vocab_size - form.cut.first_row) :] = -torch.inf",
          "logits_CV[:, form.vocab_size :] = -torch.inf"),),
        ("exact: qwen3 tied: tp2 micro8",),
        Seen(TP2, "loss", "step 1"),
    ),
    "the last row of a tensor rank's vocabulary is nobody's": Bug(
        "a reviewer: what a text that never has that token does not show",
        ((LOSS, "(rows_C < logits_CV.shape[1])", "(rows_C < logits_CV.shape[1] - (cut.group is not None))"),),
        ("exact: qwen3 tied: tp2 micro8",),
        Seen(TP2, "loss", "step 1"), steps=2,
    ),
    "a head that drops the rest of its chunks": Bug(
        "a reviewer: with tp 2 the proxy model's head had no rest",
        ((LOSS, "for start in range(0, hidden_ND.shape[0], form.chunk_tokens):",
          "for start in range(0, hidden_ND.shape[0] - form.chunk_tokens + 1, form.chunk_tokens):"),),
        ("exact: qwen3 tied: tp2 micro8",),
        Seen(TP2, "loss", "step 1"),
    ),
    "only the last chunk of tokens trains the head": Bug(
        "a reviewer: what goes right with one chunk",
        ((LOSS, "return torch.addmm(sum_VD, grad_CV.T, hidden_CD, out=sum_VD)", "return grad_CV.T @ hidden_CD"),),
        ("exact: qwen3 tied: one micro8",),
        Seen(PP2, "gradients", "model.embed_tokens.weight"),
    ),
    "the padding token sought at rank 0's positions": Bug(
        "a reviewer: every tensor rank looks for padding where the first one's part of the sequence is",
        ((DECODER, "(ids_BT[:, here] == self.arch.pad_row)", "(ids_BT[:, : hidden_BTD.shape[1]] == self.arch.pad_row)"),),
        ("exact: qwen3 tied pad: tp2 micro8",),
        Seen((*TP2, "run.micro_batch=1"), "gradients", "model.embed_tokens.weight", "padded"),
    ),
}
