"""The comparisons of context-parallel layouts turn red for each mistake of cutting rows, planted in the ranks one at a time."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from tests import cases
from tests.proof.test_same_loss_context import cut, reference, run  # noqa: F401  the fixture
from tests.proof.test_same_loss_context_dropout import check, dropped  # noqa: F401  the fixture
from windlass.model.attention import attend as attention
from windlass.model.attention import context as attention_context
from windlass.model.attention.context import Context
from windlass.model.attention.documents import find_documents
from windlass.model.attention.layout import AttentionLayout
from windlass.model.slices import Zigzag
from windlass.model.transformer import Decoder
from windlass.parallel import build, program
from windlass.parallel.mesh import Mesh
from windlass.proof.pool import RankFailed


def nothing():
    """The control: the same road without a mutation."""
    return contextlib.nullcontext()


def positions_from_zero():
    """Every rank takes its tokens for the first of the row; positions are the only numbers of one dim that are cut."""
    take = Zigzag.take
    return mock.patch.object(
        Zigzag, "take", lambda self, x: x[: len(x) // self.ranks] if x.ndim == 1 else take(self, x)
    )


def positions_as_they_stand_in_memory():
    """A rank's tokens are taken for neighbours: rank 0's are the first S, rank 1's the next."""
    take = Zigzag.take
    return mock.patch.object(
        Zigzag, "take", lambda self, x: x.chunk(self.ranks)[self.rank] if x.ndim == 1 else take(self, x)
    )


def mask_without_an_offset():
    """The queries of a slice see what the first queries of a row would."""
    attend = attention._attend

    def attend_first(q, k, v, layout, *dropping):
        length = q.shape[2]
        first = find_documents(torch.zeros(q.shape[0], 1, dtype=torch.int64), length)
        return attend(q, k[:, :, :length], v[:, :, :length], AttentionLayout(0, layout.window, first), *dropping)

    return mock.patch.object(attention, "_attend", attend_first)


def keys_in_the_ranks_order():
    return mock.patch.object(attention_context, "in_row_order", lambda x: x.flatten(0, 1))


def outputs_in_the_rows_order():
    """What goes back to the ranks is cut into neighbours."""
    return mock.patch.object(attention_context, "in_rank_order", lambda x, ranks: x.unflatten(0, (ranks, -1)))


def key_gradients_left_apart():
    """Backward of the gather keeps what this rank's queries gave, in place of the sum."""
    to_local = DTensor.to_local

    def alone(self, *, grad_placements=None):
        return to_local(self, grad_placements=[Replicate()] if grad_placements else None)

    return mock.patch.object(DTensor, "to_local", alone)


def rows_counted_by_every_rank():
    return mock.patch.object(Mesh, "sum_over_batch", Mesh.sum_over_loss)


def gradients_left_apart():
    """As if context ranks held other parameters."""
    return mock.patch.object(build, "apply_ddp", lambda model, *_: model)


def cut_by_the_global_rank():
    def cut_rows(batch, mesh):
        zigzag = Zigzag(dist.get_rank() % mesh.layout.context, mesh.layout.context)
        return {name: zigzag.take(x) if name in ("input_ids", "targets") else x for name, x in batch.items()}

    return mock.patch.object(program, "cut_rows", cut_rows)


def samples_by_the_global_rank():
    return mock.patch.object(Mesh, "batch_rank", property(lambda self: dist.get_rank() % self.layout.batch_ranks))


def shifted_after_the_cut():
    """Targets are the next token of what a rank holds; at the end of its second slice it has none."""
    cut_rows = program.cut_rows

    def shift(batch, mesh):
        held = cut_rows(batch, mesh)
        ends = held["input_ids"].roll(-1, 1)
        held["targets"] = torch.where(held["targets"] == -100, -100, ends)
        return held

    return mock.patch.object(program, "cut_rows", shift)


def borders_lost():
    parts = Context.parts
    return mock.patch.object(Context, "parts", lambda self, starts, *rest: parts(self, None, *rest))


def borders_of_the_held_positions():
    """Borders of the whole row are taken for places among this rank's tokens."""

    def shrink(self, starts, rows, length, device):
        return tuple(find_documents(starts // self.ranks, one.stop, one.start) for one in self.zigzag.of(length))

    return mock.patch.object(Context, "parts", shrink)


def elements_from_zero():
    """Masks of dropout by places in what this rank holds."""
    return mock.patch.object(Decoder, "_shares", lambda self, num_positions, device: (None, None))


def heads_from_zero():
    return mock.patch.object(Context, "heads", lambda self, heads, q: torch.arange(q.shape[1] // self.ranks))


ALL, HEADS = cut("allgather"), cut("ulysses")
PACKED = cut("allgather", packed=True)
RED = [
    (positions_from_zero, "qwen3-tied", ALL),
    (mask_without_an_offset, "qwen3-tied", ALL),
    (keys_in_the_ranks_order, "qwen3-tied", HEADS),
    (rows_counted_by_every_rank, "qwen3-tied", ALL),
    (gradients_left_apart, "qwen3-tied", cut("allgather", zero=0)),
    (borders_lost, "qwen3-tied", PACKED),
]
RED_LONG = [
    (positions_from_zero, "gpt2", HEADS),
    (positions_as_they_stand_in_memory, "qwen3-tied", HEADS),
    (keys_in_the_ranks_order, "qwen3-tied", ALL),
    (outputs_in_the_rows_order, "qwen3-tied", HEADS),
    (key_gradients_left_apart, "qwen3-tied", ALL),
    (cut_by_the_global_rank, "qwen3-tied", cut("allgather", tp=2)),
    (samples_by_the_global_rank, "qwen3-tied", cut("allgather", shard=2)),
    (shifted_after_the_cut, "qwen3-tied", ALL),
    (borders_of_the_held_positions, "qwen3-tied", PACKED),
]
EVERY = [*RED, *(pytest.param(*one, marks=pytest.mark.long) for one in RED_LONG)]


def name_of(value):
    if callable(value):
        return value.__name__
    return value if isinstance(value, str) else dict(value.sharding)["context_kind"]


@pytest.mark.parametrize(("mutation", "model", "case"), EVERY, ids=name_of)
def test_the_comparison_turns_red(ranks, reference, mutation, model, case):  # noqa: F811
    with pytest.raises(AssertionError) as caught:
        run(cases.Mutating(ranks, mutation), reference, model, case)
    assert not isinstance(caught.value, RankFailed), "the ranks trained on; it is the comparison that finds it"


@pytest.mark.long
@pytest.mark.parametrize("case", [ALL, HEADS, PACKED], ids=name_of)
def test_without_a_mutation_it_is_green(ranks, reference, case):  # noqa: F811
    run(cases.Mutating(ranks, nothing), reference, "qwen3-tied", case)


@pytest.mark.parametrize(
    ("mutation", "family", "case"),
    [
        (elements_from_zero, "gpt2", ALL),
        pytest.param(elements_from_zero, "gpt2", HEADS, marks=pytest.mark.long),
        pytest.param(heads_from_zero, "qwen3", HEADS, marks=pytest.mark.long),
    ],
    ids=name_of,
)
def test_the_comparison_of_masks_turns_red(ranks, dropped, mutation, family, case):  # noqa: F811
    with pytest.raises(AssertionError) as caught:
        check(ranks, dropped, family, case, cases.train_mutated, mutation)
    assert not isinstance(caught.value, RankFailed)
