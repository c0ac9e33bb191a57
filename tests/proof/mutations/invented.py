"""Bugs by a reviewer who had read what verify does, and looked for what it misses. As in published.py."""

from tests.proof.mutations.published import CLIP, PIPELINE, Bug

FORGETS_ROTATION = (
    "model/transformer.py",
    "turned = None if int(index) in self.arch.unrotated_layers else rope",
    "turned = None if int(index) == 1 else rope",
)
INVENTED = {
    "a head that drops the rest of its chunks": Bug(
        "a reviewer: with tp 2 the proxy model's head had no rest",
        (
            (
                "model/loss.py",
                "for start in range(0, hidden_ND.shape[0], chunk_tokens):",
                "for start in range(0, hidden_ND.shape[0] - chunk_tokens + 1, chunk_tokens):",
            ),
        ),
        ("parallel.tp=2", "parallel.shard=1"),
        "loss",
        "step 1",
    ),
    "documents of a row see each other": Bug(
        "a reviewer: with tp 2 no row of the step that is compared had a second document",
        (
            (
                "model/transformer.py",
                "found = None if documents is None else find_documents(documents, num_positions)",
                "found = None",
            ),
        ),
        ("parallel.tp=2", "parallel.shard=1", "data.isolate=true"),
        "residual stream",
        "layer 0 (model.layers.0)",
    ),
    "a layer of a later stage does not rotate": Bug(
        "a reviewer: a forward that is wrong in one layer was named by the loss alone",
        (FORGETS_ROTATION,),
        ("parallel.pp=2", "parallel.shard=1"),
        "residual stream",
        "layer 1 (model.layers.1)",
        model="two_layers",
    ),
    "a layer of a tensor rank does not rotate": Bug(
        "a reviewer: as above",
        (FORGETS_ROTATION,),
        ("parallel.tp=2", "parallel.shard=1"),
        "residual stream",
        "layer 1 (model.layers.1)",
        model="two_layers",
    ),
    "targets across the border of two documents count": Bug(
        "a reviewer: the reference run took its rows from the same code",
        (
            (
                "data/packing.py",
                "np.where(ids_BS[:, :-1] == eos_id, NOT_COUNTED, labels_BS[:, 1:])",
                "labels_BS[:, 1:]",
            ),
        ),
        ("parallel.tp=2", "parallel.shard=1", "data.isolate=true"),
        "samples",
        "targets over the ranks are not the global batch's",
    ),
    "documents begin one token late": Bug(
        "a reviewer: as above",
        (
            (
                "data/packing.py",
                "begins_BT[:, 1:] = ids_BS[:, :-2] == eos_id",
                "begins_BT[:, 1:] = np.roll(ids_BS[:, :-2], 1, 1) == eos_id",
            ),
        ),
        ("parallel.tp=2", "parallel.shard=1", "data.isolate=true"),
        "samples",
        "documents over the ranks are not the global batch's",
    ),
    "a later step divided by the first one's count": Bug(
        "a reviewer: a count that is kept",
        (
            (
                PIPELINE,
                "loss = self._precision.as_output(nats) / self._count",
                'loss = self._precision.as_output(nats) / self.__dict__.setdefault("_first_count", self._count)',
            ),
        ),
        ("parallel.pp=2", "parallel.shard=1"),
        "loss of later steps",
        "step 2",
    ),
    "padded rows of the vocabulary in the loss": Bug(
        "a reviewer: rows masked by the whole vocabulary's number on a rank's own rows",
        (
            (
                "model/loss.py",
                "logits_CV[:, max(0, vocab_size - cut.first_row) :] = -torch.inf",
                "logits_CV[:, vocab_size:] = -torch.inf",
            ),
        ),
        ("parallel.tp=2", "parallel.shard=1"),
        "loss",
        "step 1",
    ),
    "the sum of a token's router weights is a constant": Bug(
        "a reviewer: a forward that is right, a backward that is not",
        (
            (
                "model/moe.py",
                "weights_BTK / weights_BTK.sum(-1, keepdim=True)",
                "weights_BTK / weights_BTK.detach().sum(-1, keepdim=True)",
            ),
        ),
        ("parallel.shard=2", "parallel.expert=2"),
        "gradients",
        "model.layers.2.mlp.gate.weight[",
        model="qwen3_moe",
    ),
    "copied heads in the order of the copies": Bug(
        "a reviewer: under ulysses a query head's copy of another key/value head",
        (
            (
                "model/attention/context.py",
                "k_BGSK, v_BGSK = k_BGSK.repeat_interleave(times, 1), v_BGSK.repeat_interleave(times, 1)",
                "k_BGSK, v_BGSK = k_BGSK.repeat(1, times, 1, 1), v_BGSK.repeat(1, times, 1, 1)",
            ),
        ),
        ("parallel.context=4", "parallel.context_kind=ulysses", "parallel.shard=1"),
        "residual stream",
        "layer 0 (model.layers.0)",
        model="qwen3_two_groups",
    ),
    "small gradients scaled up to the norm": Bug(
        "a reviewer: a clip that also does the opposite",
        ((CLIP, "(max_norm / (norm + EPSILON)).clamp_(max=1.0)", "(max_norm / (norm + EPSILON))"),),
        ("parallel.shard=2",),
        "weights after 3 steps",
        "of 35 tensors",
    ),
    "a halved validation": Bug(
        "a reviewer: what is scored is not what is learned from",
        (
            (
                "parallel/program.py",
                "total = torch.stack([self._forward(batch) for batch in batches]).sum()",
                "total = torch.stack([self._forward(batch) for batch in batches[::2]]).sum()",
            ),
        ),
        ("parallel.shard=2",),
        "validation before",
        "step 0 on rank 0",
    ),
    "a resume that loses the optimizer's states": Bug(
        "a reviewer: a run that begins from another's checkpoint keeps them, its own resume does not",
        (
            (
                "training/restore.py",
                "    if trainer_state is not None:\n",
                "    if trainer_state is not None:\n        [state.zero_() for state in optimizer.state_tensors().values()]\n",
            ),
        ),
        ("parallel.shard=2",),
        "resumed: loss",
        "step 3",
    ),
    "only the last bucket waited for": Bug(
        "a reviewer: what goes right with one bucket of gradients",
        (("parallel/ddp.py", "for work, flat, members in pending:", "for work, flat, members in pending[-1:]:"),),
        ("parallel.tp=2", "parallel.replicate=2", "parallel.zero=0"),
        "gradients",
        "model.layers.2.",
    ),
    "gradients not sent without accumulation": Bug(
        "a reviewer: what goes right with several micro-batches, and a recipe may have one",
        (
            (
                "parallel/program.py",
                "is_last = index == len(batches) - 1",
                "is_last = index == len(batches) - 1 and index > 0",
            ),
        ),
        ("parallel.replicate=2", "parallel.zero=0"),
        "resumed: loss",
        "step 3",
    ),
    "only the last chunk of tokens trains the head": Bug(
        "a reviewer: what goes right with one chunk",
        (
            (
                "model/loss.py",
                "grad_weight_VD += grad_CV.T @ hidden_ND[chunk]",
                "grad_weight_VD = grad_CV.T @ hidden_ND[chunk]",
            ),
        ),
        ("parallel.pp=2", "parallel.shard=1"),
        "gradients",
        "model.embed_tokens.weight",
    ),
    "the last row of a tensor rank's vocabulary is nobody's": Bug(
        "a reviewer: what a text that never has that token does not show",
        (
            (
                "model/loss.py",
                "(rows_C < logits_CV.shape[1])",
                "(rows_C < logits_CV.shape[1] - (cut.group is not None))",
            ),
        ),
        ("parallel.tp=2", "parallel.shard=1"),
        "loss",
        "step 1",
    ),
    "router figures of one replica": Bug(
        "a reviewer: what is reported is not what is trained",
        (
            (
                "parallel/routers.py",
                "for group in (self._mesh.loss_group, self._mesh.parts):",
                "for group in (self._mesh.parts,):",
            ),
        ),
        ("parallel.shard=2", "parallel.expert=2"),
        "router figures",
        "step 1",
        model="qwen3_moe",
    ),
    "the padding token sought at rank 0's positions": Bug(
        "a reviewer: every tensor rank looks for padding where the first one's part of the sequence lies",
        (
            (
                "model/transformer.py",
                "(ids_BT[:, here] == self.arch.pad_row)",
                "(ids_BT[:, : hidden_BTD.shape[1]] == self.arch.pad_row)",
            ),
        ),
        ("parallel.tp=2", "parallel.shard=1", "run.micro_batch=1"),
        "gradients",
        "model.embed_tokens.weight",
        model="padded",
    ),
}
