"""Context parallelism: what is cut, what is sent counted to the byte, what a block keeps."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.tiny import MODEL, each, make_program
from windlass.model.attention.layout import AttentionLayout
from windlass.parallel.config import MeshLayout as Axes
from windlass.parallel.context import cut_rows
from windlass.parallel.mesh import make_mesh
from windlass.ranks.owned_part import local_part

BLOCKS, HEADS, KV_HEADS, CHANNELS, TOKENS, ROWS = 3, 4, 2, 8, 16, 2
HEADED = MODEL | {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
KINDS = ("allgather", "ulysses")


def batch(seed, packed=False):
    ids = torch.randint(0, 150, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    targets = ids[:, 1:].clone()
    targets[seed % ROWS, : 3 + seed] = -100
    given = {"input_ids": ids[:, :-1], "targets": targets}
    return given | ({"documents": torch.tensor([[0, 5, 6], [0, 11, TOKENS]])} if packed else {})


def parts():
    mesh = make_mesh(Axes(1, 1, 2, 2, 1, 1), "cpu")
    whole = {name: torch.arange(8).repeat(2, 1) for name in ("input_ids", "targets", "documents")}
    whole["keys"] = torch.arange(2)
    return {name: value.tolist() for name, value in cut_rows(whole, mesh).items()}


def test_a_rank_has_a_slice_from_each_end_of_every_row_and_knows_the_rows_borders(ranks):
    held = ([0, 1, 6, 7], [2, 3, 4, 5])
    for rank, cut in enumerate(ranks.run(4, parts)):
        mine = [held[rank % 2]] * 2  # context is the innermost of these axes
        assert cut == {"input_ids": mine, "targets": mine, "documents": [[*range(8)]] * 2, "keys": [0, 1]}


class Sent(TorchDispatchMode):
    """Calls of collectives and the bytes that go into them. FSDP2's own are others, c10d's, and are left out."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        space, _, name = function._schema.name.partition("::")
        if name == "alltoall_base_" or (space == "_c10d_functional" and not name.startswith(("wait", "_wrap"))):
            given = args[1] if name == "alltoall_base_" else args[0]
            self.calls[name] += 1
            self.bytes[name] += given.nbytes
        return function(*args, **(kwargs or {}))


def sent_per_step(context, kind, micro_batches, recompute):
    program = make_program(
        context, policy="fp64", model=HEADED, context=context, context_kind=kind, recompute=recompute
    )
    batches = [batch(index) for index in range(micro_batches)]
    program.run(batches, torch.tensor(40.0))
    program.model.zero_grad()
    with Sent() as sent:
        program.run(batches, torch.tensor(40.0))
    return dict(sent.calls), dict(sent.bytes)


COUNTED = [(3, "none"), (1, "full"), (1, "selective")]
SIZES = [2, pytest.param(4, marks=pytest.mark.long)]


def sent(ranks, context, kind):
    """(micro-batches, recomputation, calls, bytes) of every rank and case."""
    calls = [partial(sent_per_step, context, kind, *case) for case in COUNTED]
    for found in ranks.run(context, each, *calls):
        yield from ((*case, *counts) for case, counts in zip(COUNTED, found, strict=True))


@pytest.mark.parametrize("context", SIZES)
def test_allgather_sends_what_the_docstring_says(ranks, context):
    whole = 2 * ROWS * TOKENS * KV_HEADS * CHANNELS * 8  # n, bytes
    for micro_batches, recompute, calls, sizes in sent(ranks, context, "allgather"):
        per_step = micro_batches * BLOCKS
        gathers = per_step * (1 if recompute == "none" else 2)
        assert calls == {"all_gather_into_tensor": gathers, "reduce_scatter_tensor": per_step}
        assert sizes == {
            "all_gather_into_tensor": gathers * whole // context,
            "reduce_scatter_tensor": per_step * whole,
        }


@pytest.mark.parametrize("context", SIZES)
def test_ulysses_sends_what_the_docstring_says(ranks, context):
    kv_heads = max(KV_HEADS, context)  # with copies
    token = ROWS * TOKENS // context * CHANNELS * 8
    for micro_batches, recompute, calls, sizes in sent(ranks, context, "ulysses"):
        per_step = micro_batches * BLOCKS * (2 if recompute == "none" else 3)
        assert calls == {"alltoall_base_": 2 * per_step}
        assert sizes == {"alltoall_base_": per_step * token * (HEADS + 2 * kv_heads + HEADS)}


def kept_bytes(context, kind, recompute):
    """Bytes that autograd keeps of one block's forward, parameters aside."""
    program = make_program(
        context, policy="fp64", model=HEADED, context=context, context_kind=kind, recompute=recompute
    )
    block, row = program.model.blocks[0], program.model.context
    if isinstance(block, FSDPModule):
        block.unshard()
    own, kept = {local_part(parameter).untyped_storage().data_ptr() for parameter in block.parameters()}, {}

    def pack(tensor):
        storage = local_part(tensor).untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    layout = AttentionLayout()
    if row is not None:
        layout = AttentionLayout(
            context=row, slice_documents=row.slice_documents(None, ROWS, TOKENS, torch.device("cpu"))
        )
    stream = torch.randn(ROWS, TOKENS // context, HEADED["hidden_size"], dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(stream, None, layout)
    del out
    return sum(kept.values())


@pytest.mark.parametrize("context", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_recomputed_block_keeps_one_nth(ranks, kind, recompute, context):
    (whole,) = ranks.run(1, kept_bytes, 1, "allgather", recompute)
    assert set(ranks.run(context, kept_bytes, context, kind, recompute)) == {whole // context}


@pytest.mark.parametrize("context", SIZES)
def test_a_block_keeps_one_nth_but_for_what_the_docstring_names(ranks, context):
    (whole,) = ranks.run(1, kept_bytes, 1, "allgather", "none")
    output = ROWS * TOKENS // context * HEADS * CHANNELS * 8
    keys = 2 * ROWS * TOKENS * KV_HEADS * CHANNELS * 8  # and values, of whole rows
    kept = {kind: set(ranks.run(context, kept_bytes, context, kind, "none")) for kind in KINDS}
    assert kept["allgather"] == {(whole - keys) // context + keys + output}
    copied = max(KV_HEADS, context) / KV_HEADS * keys
    assert kept["ulysses"] == {(whole - keys + copied) // context + output}
