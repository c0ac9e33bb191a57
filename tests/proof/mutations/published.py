"""Bugs that users of other frameworks found late, as patches: (file, text, what stands in its place). Each says where it was
published, on which layout it shows, and what verify must name. invented.py has more.
A text that is not there exactly once is a failing test: a patch that no longer applies proves nothing.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """`seen`: the row of the table that differs first; `named`: what is told of its first difference."""

    source: str
    patches: tuple[tuple[str, str, str], ...]
    layout: tuple[str, ...]
    seen: str
    named: str
    model: str = "qwen3"


TENSOR, PIPELINE, CLIP = "parallel/tensor.py", "parallel/pipeline.py", "optim/clip.py"

PUBLISHED = {
    "scaled by the pipeline's micro-batches": Bug(
        "torch.distributed.pipelining's default; torchtitan #2972: gradients too small by a count",
        ((PIPELINE, "scale_grads=False)", "scale_grads=True)"),),
        ("parallel.pp=2", "parallel.shard=1"),
        "gradients",
        "model.embed_tokens.weight",
    ),
    "norm of a rank's own shards": Bug(
        "LLaMA-Factory PR 10640: norm off by sqrt(shards), each shard clipped by its own",
        (
            (
                CLIP,
                "norm = torch.nn.utils.get_total_norm(gradients)",
                "norm = torch.nn.utils.get_total_norm(_local(gradients))",
            ),
        ),
        ("parallel.shard=2",),
        "gradient norm",
        "step 1 on rank 0",
    ),
    "norm of a pipeline's own stage": Bug(
        "torchtune #2420, Megatron-LM PR 5916: the norm leaves out other ranks' parameters",
        ((CLIP, "    if parts.size() > 1:", "    if parts.size() > 99:"),),
        ("parallel.pp=2", "parallel.shard=1"),
        "gradient norm",
        "step 1 on rank 0",
    ),
    "untied ends": Bug(
        "Megatron-LM #7452 (several): tied embedding, its ends on two stages, trained apart",
        (("parallel/tie.py", "            gradient.add_(given)\n", "            pass\n"),),
        ("parallel.pp=2", "parallel.shard=1"),
        "gradients",
        "model.embed_tokens.weight",
    ),
    "tied head counted twice in the norm": Bug(
        "Megatron-LM #7452: a shared parameter's copy in the global norm",
        (
            (PIPELINE, " for name, p in named if p is not mirror]", " for name, p in named]"),
            ("parallel/tie.py", "            self.head.grad = None\n", "            pass\n"),
        ),
        ("parallel.pp=2", "parallel.shard=1"),
        "gradient norm",
        "step 1 on rank 0",
    ),
    "sequence parallelism without the reduction of norms' gradients": Bug(
        "torchtitan #1750 and Megatron-LM #673: norms see a part of the sequence and are not summed over tp",
        ((TENSOR, "return parameter.to_local(grad_placements=[Partial()])", "return parameter.to_local()"),),
        ("parallel.tp=2", "parallel.shard=1"),
        "gradients",
        "model.norm.weight[",
    ),
    "a row bias on every tensor rank": Bug(
        "Megatron-LM #7452: a bias added before the reduction, once per rank",
        (
            (
                TENSOR,
                "return out_BSD if bias_D is None else out_BSD + bias_D",
                "return out_BSD if bias_D is None else out_BSD + self.mesh.size() * bias_D",
            ),
        ),
        ("parallel.tp=2", "parallel.shard=1"),
        "residual stream",
        "layer 0 (model.layers.0)",
        model="gpt2",
    ),
    "targets taken for a rank's own rows": Bug(
        "vocabulary-parallel cross-entropy with targets not moved by the first row (torchtitan #1750, open)",
        ((TENSOR, "self.mesh.get_local_rank() * weight_VD.shape[0])\n        return", "0)\n        return"),),
        ("parallel.tp=2", "parallel.shard=1"),
        "loss",
        "step 1",
    ),
    "data sliced by the global rank": Bug(
        "verl #4250 and others: ranks that compute one sample together read different ones",
        (
            (
                "parallel/mesh.py",
                'return self.coordinate["replicate"] * self.layout.shard + self.coordinate["shard"]',
                "return dist.get_rank() % self.layout.batch_ranks",
            ),
        ),
        ("parallel.tp=2", "parallel.shard=2"),
        "samples",
        "are not those of its model-parallel group",
    ),
    "a mean of the ranks' means": Bug(
        "transformers PR 34191, torchtune PR 1875: every rank divides by its own count",
        (
            (
                "objectives/pretrain.py",
                "return batches, program.mesh.sum_over_batch(local)",
                "return batches, local * program.mesh.layout.batch_ranks",
            ),
        ),
        ("parallel.shard=2",),
        "loss",
        "step 1",
    ),
    "averaged over data ranks": Bug(
        "DDP's and FSDP's default: a loss that is divided by the global count is divided by the ranks once more",
        (("parallel/fsdp.py", "        one.set_gradient_divide_factor(1.0)\n", ""),),
        ("parallel.shard=2",),
        "gradients",
        "is 0.5 times too large",
    ),
    "accumulation sums what was summed": Bug(
        "torchtitan #1733, #1732: accumulation became a moving sum",
        (
            (
                "parallel/program.py",
                "if isinstance(self.caller, DistributedDataParallel) and not is_last:",
                "if isinstance(self.caller, int):",
            ),
        ),
        ("parallel.zero=0", "parallel.replicate=2"),
        "gradients",
        "model.embed_tokens.weight",
    ),
    "replicas are not summed beside a pipeline": Bug(
        "torchtitan #596: data-parallel gradients dropped where backward is cut in two",
        (("parallel/ddp.py", "    if mesh.loss_group.size() > 1:", "    if mesh.loss_group.size() > 99:"),),
        ("parallel.pp=2", "parallel.zero=0", "parallel.replicate=2"),
        "gradients",
        "model.embed_tokens.weight",
    ),
    "the optimizer's state is lost on resume": Bug(
        "torchtitan #1136, axolotl #2744: a resumed run has another loss",
        (
            (
                "training/restore.py",
                "return weight_tensors(program) | state | scale",
                "return weight_tensors(program) | scale",
            ),
        ),
        ("parallel.shard=2",),
        "resumed: loss",
        "step 3",
    ),
    "positions of context ranks begin at 0": Bug(
        "Megatron-LM #7452, #1464: rotary positions of a rank's slices",
        (
            (
                "model/transformer.py",
                "            positions = context.zigzag.take(positions)\n",
                "            positions = positions[..., : input_ids.shape[1]]\n",
            ),
        ),
        ("parallel.context=2", "parallel.shard=1"),
        "residual stream",
        "layer 0 (model.layers.0)",
    ),
    "keys' gradients stay with the rank that used them": Bug(
        "Megatron-LM #1464: dK and dV wrong under context parallelism",
        (
            (
                "model/attention/context.py",
                "redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])",
                "redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])",
            ),
        ),
        ("parallel.context=2", "parallel.shard=1"),
        "gradients",
        "model.layers.2.self_attn.k_norm.weight[",
    ),
    "targets counted once per context rank": Bug(
        "torchtitan, NeMo: the loss divided by context once more",
        (("objectives/pretrain.py", "program.mesh.sum_over_batch(local)", "program.mesh.sum_over_loss(local)"),),
        ("parallel.context=2", "parallel.shard=1"),
        "loss",
        "step 1",
    ),
    "a router's loss over a context rank's own tokens": Bug(
        "transformers #48687 and Megatron-LM #7452: shares of experts averaged before they are multiplied",
        (
            (
                "parallel/expert.py",
                "        model.routing.sum_counts = _sum_over(mesh.context.get_group())\n",
                "        pass\n",
            ),
        ),
        ("parallel.context=2", "parallel.shard=1"),
        "gradients",
        "model.layers.2.mlp.gate.weight[",
        model="qwen3_moe",
    ),
    "a router's loss once per tensor rank": Bug(
        "Megatron-LM #7452: the auxiliary loss grows with tensor parallelism",
        (
            (
                "model/routing.py",
                "factor = self._arch.router_loss_scale / self.parts",
                "factor = self._arch.router_loss_scale",
            ),
        ),
        ("parallel.tp=2", "parallel.shard=1"),
        "gradients",
        "model.layers.2.mlp.gate.weight[",
        model="qwen3_moe",
    ),
    "tokens come back from experts without their gradients' way": Bug(
        "transformers PR 48205: the loss is right under expert parallelism, the router's gradient is not",
        (
            (
                "parallel/expert.py",
                "        return _all_to_all(grads[0], received_X, sent_X, ctx.group), None, None, None",
                "        return _all_to_all(grads[0], received_X, sent_X, ctx.group) * 2, None, None, None",
            ),
        ),
        ("parallel.expert=2", "parallel.shard=2"),
        "gradients",
        "model.embed_tokens.weight",
        model="qwen3_moe",
    ),
    "tensor ranks draw alike": Bug(
        "ms-swift PR 7944: one seed on all tensor ranks, so that their parts of a matrix are copies",
        (
            (
                "model/init.py",
                "        ranges = owned_ranges(parameter)\n",
                "        ranges = [range(len(one)) for one in owned_ranges(parameter)]\n",
            ),
        ),
        ("parallel.tp=2", "parallel.shard=1"),
        "drawn weights",
        "_proj.weight[",
    ),
    "replicas draw apart": Bug(
        "OLMo-core PR 319: nothing sends the first weights around, and each replica begins with its own",
        (
            (
                "training/restore.py",
                "architecture, config.run.seed, block)",
                "architecture, torch.distributed.get_rank(), block)",
            ),
        ),
        ("parallel.shard=2", "parallel.replicate=2"),
        "drawn weights",
        "model.layers.2.mlp.down_proj.weight[",
    ),
    "validation times the ranks": Bug(
        "transformers #35078: the loss that is told of a set grows with the processes that score it",
        (("data/stream/evaluation_set.py", "num_targets=len(targets),", "num_targets=len(targets) // batch_ranks,"),),
        ("parallel.shard=2",),
        "reported validation",
        "step 0 on rank 0",
    ),
}
QUICK = (
    "untied ends",
    "sequence parallelism without the reduction of norms' gradients",
    "a head that drops the rest of its chunks",
    "documents of a row see each other",
    "a layer of a later stage does not rotate",
)
