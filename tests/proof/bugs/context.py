"""Rows that ranks share, documents that share a row, and masks of dropout."""

from tests.proof.bugs.bug import Bug, Seen

ATTEND, CONTEXT, DECODER = "model/attention/attend.py", "model/attention/context.py", "model/transformer.py"
CUT, DROPOUT, PACKING, MESH = "parallel/context.py", "model/dropout.py", "data/packing.py", "parallel/mesh.py"
CONTEXT2, TP2 = ("parallel.context=2", "parallel.shard=1"), ("parallel.tp=2", "parallel.shard=1", "data.isolate=true")

# fmt: off
# ruff: noqa: E501  texts of the source, whole lines of it
CONTEXT_BUGS = {
    "positions of context ranks begin at 0": Bug(
        "Megatron-LM #7452, #1464: rotary positions of a rank's slices",
        ((DECODER, "            positions = context.zigzag.take(positions)\n",
          "            positions = positions[..., : input_ids.shape[1]]\n"),),
        ("exact: qwen3 tied: context2 allgather", "exact: gpt2 tied heads4: context2 ulysses"),
        Seen(CONTEXT2, "residual stream", "layer 0 (model.layers.0)"),
    ),
    "positions as they are in memory": Bug(
        "a rank's tokens are taken for neighbours: rank 0's are the first S, rank 1's the next",
        ((DECODER, "            positions = context.zigzag.take(positions)\n",
          "            positions = positions.chunk(context.num_ranks, -1)[context.index]\n"),),
        ("exact: qwen3 tied: context2 ulysses",),
    ),
    "a causal mask without an offset": Bug(
        "the queries of a slice see what the first queries of a row would",
        ((ATTEND, "k_BGSK[:, :, : where.stop], v_BGSK[:, :, : where.stop]",
          "k_BGSK[:, :, : where.stop - where.start], v_BGSK[:, :, : where.stop - where.start]"),
         (ATTEND, "AttentionLayout(where.start, window", "AttentionLayout(0, window"),
         (CONTEXT, "find_documents(starts_BM, part.stop, part.start)", "find_documents(starts_BM, part.stop - part.start)")),
        ("exact: qwen3 tied: context2 allgather",),
    ),
    "keys in the ranks' order": Bug(
        "what the ranks send is joined as it comes",
        ((CONTEXT, "return torch.cat((first_NC, second_NC.flip(0))).flatten(0, 1)", "return x_NS.flatten(0, 1)"),),
        ("exact: qwen3 tied: context2 ulysses", "exact: qwen3 tied: context2 allgather"),
    ),
    "outputs in the row's order": Bug(
        "what goes back to the ranks is cut into neighbours",
        ((CONTEXT, "return torch.stack((first_NC, second_NC.flip(0)), 1).flatten(1, 2)", "return x_T.unflatten(0, (num_ranks, -1))"),),
        ("exact: qwen3 tied: context2 ulysses",),
    ),
    "copied heads in the order of the copies": Bug(
        "a reviewer: under ulysses a query head's copy of another key/value head",
        ((CONTEXT, "k_BGSK, v_BGSK = k_BGSK.repeat_interleave(times, 1), v_BGSK.repeat_interleave(times, 1)",
          "k_BGSK, v_BGSK = k_BGSK.repeat(1, times, 1, 1), v_BGSK.repeat(1, times, 1, 1)"),),
        ("exact: qwen3 tied: context4 micro8 ulysses",),
        Seen(("parallel.context=4", "parallel.context_kind=ulysses", "parallel.shard=1"), "residual stream",
             "layer 0 (model.layers.0)", "qwen3_two_groups"),
    ),
    "keys' gradients stay with the rank that used them": Bug(
        "Megatron-LM #1464: dK and dV wrong under context parallelism",
        ((CONTEXT, "redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])",
          "redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])"),),
        ("exact: qwen3 tied: context2 allgather",),
        Seen(CONTEXT2, "gradients", "model.layers.2.self_attn.k_norm.weight["),
    ),
    "targets counted once per context rank": Bug(
        "torchtitan, NeMo: the loss divided by context once more",
        (("objectives/pretrain.py", "program.mesh.sum_over_batch(local)", "program.mesh.sum_over_loss(local)"),),
        verify=Seen(CONTEXT2, "loss", "step 1"),
    ),
    "rows counted by every context rank": Bug(
        "as above, where the ranks sum",
        ((MESH, "return _sum(value, self.batch_group)", "return _sum(value, self.loss_group)"),),
        ("exact: qwen3 tied: context2 allgather",),
    ),
    "gradients of context ranks left apart": Bug(
        "as if context ranks held other parameters",
        (("parallel/build.py", "if config.zero_stage != 0 or not is_whole", "if mesh.layout.context > 1 or config.zero_stage != 0 or not is_whole"),),
        ("exact: qwen3 tied: context2 zero0 allgather",),
    ),
    "rows cut by the global rank": Bug(
        "ranks that share heads cut a row where ranks that share rows should",
        ((CUT, 'Zigzag(mesh.coordinate["context"], ', "Zigzag(torch.distributed.get_rank() % mesh.layout.context, "),),
        ("exact: qwen3 tied: context2 tp2 allgather",),
    ),
    "targets shifted after the cut": Bug(
        "a rank's targets are the next tokens of what it holds; at the end of its second slice it has none",
        ((CUT, "    rows = {name: zigzag.take(value) if name in PER_TOKEN else value for name, value in batch.items()}\n",
          "    rows = {name: zigzag.take(value) if name in PER_TOKEN else value for name, value in batch.items()}\n"
          "    shifted = rows['input_ids'].roll(-1, 1)\n"
          "    rows |= {'targets': torch.where(rows['targets'] == -100, -100, shifted)}\n"),),
        ("exact: qwen3 tied: context2 allgather",),
    ),
    "borders lost": Bug(
        "the ranks that share a row know of one document",
        ((CONTEXT, "        if starts_BM is None:\n", "        if True:\n"),),
        ("exact: qwen3 tied: context2 packed allgather",),
    ),
    "borders of the held positions": Bug(
        "borders of the whole row are taken for places among a rank's tokens",
        ((CONTEXT, "find_documents(starts_BM, part.stop, part.start)", "find_documents(starts_BM // self.num_ranks, part.stop, part.start)"),),
        ("exact: qwen3 tied: context2 packed allgather",),
    ),
    "documents of a row see each other": Bug(
        "a reviewer: with tp 2 no row of the step that is compared had a second document",
        ((DECODER, "found = None if documents is None else find_documents(documents, end, offset)", "found = None"),),
        ("exact: qwen3 tied: zero2 shard2 micro4 packed",),
        Seen(TP2, "residual stream", "layer 0 (model.layers.0)"),
    ),
    "documents of other rows": Bug(
        "each rank takes the borders of the first rows",
        ((DECODER, "else find_documents(documents, end, offset)", "else find_documents(documents.roll(1, 0), end, offset)"),),
        ("exact: qwen3 tied: zero2 shard2 micro4 packed",),
    ),
    "targets across the border of two documents count": Bug(
        "a reviewer: the reference run took its rows from the same code",
        ((PACKING, "np.where(ends_BS[:, :-1], NOT_COUNTED, targets_BT)", "targets_BT"),),
        verify=Seen(TP2, "samples", "targets over the ranks are not the global batch's"),
    ),
    "documents begin one token late": Bug(
        "a reviewer: as above",
        ((PACKING, "begins_BT[:, 1:] = ends_BS[:, :-2]", "begins_BT[:, 1:] = np.roll(ends_BS[:, :-2], 1, 1)"),),
        verify=Seen(TP2, "samples", "documents over the ranks are not the global batch's"),
    ),
    "keys of the rank": Bug(
        "a sample's place in its rank's own batch, in place of its place in the stream",
        (("tests/cases.py", "step * SEQUENCES + mine.start, mine", "step * SEQUENCES, mine"),),
        ("masks: gpt2 tied drops: zero0 replicate2 micro4", "masks: gpt2 tied drops: replicate2 shard2 micro1",
         "masks: gpt2 tied drops: zero0 replicate2 micro4 fp32", "masks: gpt2 tied drops: replicate2 shard2 micro1 fp32"),
    ),
    "keys of the first step": Bug(
        "every step has the first one's masks",
        (("tests/cases.py", "step * SEQUENCES + mine.start, mine", "mine.start, mine"),),
        ("masks: gpt2 tied drops: one micro1", "masks: gpt2 tied drops: one micro1 fp32"), steps=2,
    ),
    "other masks in recomputation": Bug(
        "what a generator without saved states would do",
        ((DROPOUT, "row_keys(keys_B, site, positions_T)",
          "row_keys(keys_B + (torch._C._current_graph_task_id() != -1), site, positions_T)"),),
        ("masks: gpt2 tied drops: one full", "masks: gpt2 tied drops: zero2 shard2 selective", "masks: gpt2 tied drops: one full fp32",
         "masks: gpt2 tied drops: zero2 shard2 selective fp32"),
    ),
    "sites left out of the masks": Bug(
        "attention's output and the MLP's share a mask",
        ((DROPOUT, "return _mix64(keys + (((number + 1) * GOLDEN_64 + 2**63) % 2**64 - 2**63))", "return keys"),),
        ("masks: gpt2 tied drops: one micro1", "masks: gpt2 tied drops: one micro1 fp32"),
    ),
    "layers left out of the masks": Bug(
        "every layer has the same masks",
        ((DROPOUT, "return fold_keys(fold_keys(keys_B, LAYERS), layers[:, None])", "return keys_B.expand(len(layers), -1)"),),
        ("masks: gpt2 tied drops: shard2", "masks: gpt2 tied drops: shard2 fp32"),
    ),
    "masks drawn from a generator": Bug(
        "torch's own dropout: each rank draws what it draws",
        ((DROPOUT, "return torch.where(kept_BTD, x_BTD * (1 / (1 - probability)), 0)",
          "return torch.nn.functional.dropout(x_BTD, probability)"),),
        ("masks: gpt2 tied drops: shard2", "masks: gpt2 tied drops: shard2 fp32"),
    ),
    "evaluation that drops": Bug(
        "the model stays in training",
        (("parallel/program.py", "self.model.eval()", "self.model.train()"),),
        ("masks: gpt2 tied drops: zero0 replicate2 micro4", "masks: gpt2 tied drops: zero0 replicate2 micro4 fp32"),
    ),
    "elements of masks from zero": Bug(
        "every rank takes its positions and heads for the first ones, in the masks of dropout",
        ((DECODER, "if self.share.num_ranks == 1 and self.context is None:", "if True:"),),
        ("masks: gpt2 tied heads4 drops: tp2 micro8", "masks: gpt2 tied heads4 drops: context2 allgather",
         "masks: gpt2 tied heads4 drops: context2 ulysses"),
    ),
    "heads of masks from zero": Bug(
        "under ulysses every rank takes its heads for the first ones",
        ((CONTEXT, "return heads_H[Share(self.index, self.num_ranks).of(len(heads_H))]",
          "return torch.arange(q_BHSK.shape[1] // self.num_ranks)"),),
        ("masks: qwen3 tied drops: context2 ulysses",),
    ),
}
