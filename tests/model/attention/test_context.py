"""Rows cut over context ranks: the orders of slices, who gets which head, and attention against that of whole rows."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from windlass.model.attention.attend import attend
from windlass.model.attention.context import KINDS, Context, copies, in_rank_order, in_row_order
from windlass.model.attention.documents import find_documents
from windlass.model.attention.layout import AttentionLayout
from windlass.model.slices import Zigzag

ROWS, LENGTH, CHANNELS = 2, 24, 6
KEYS = torch.tensor([4, -9])
STARTS = torch.tensor([[0, 2, 11, 24], [0, 7, 8, 19]])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_hold_each_position_once_and_see_as_many_keys_as_each_other(ranks):
    places = [Zigzag(rank, ranks).take(torch.arange(LENGTH)) for rank in range(ranks)]
    assert torch.cat(places).sort().values.tolist() == [*range(LENGTH)]
    assert len({int((part + 1).sum()) for part in places}) == 1
    first, last = Zigzag(0, ranks).of(LENGTH)
    assert first.start == 0 and last.stop == LENGTH


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_rows_order_and_the_ranks_order_are_each_others_inverse(ranks):
    row_T = torch.arange(LENGTH)
    held_NS = torch.stack([Zigzag(rank, ranks).take(row_T) for rank in range(ranks)])
    assert torch.equal(in_row_order(held_NS), row_T)
    assert torch.equal(in_rank_order(row_T, ranks), held_NS)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "times"),
    [(8, 8, 4, 1), (8, 4, 4, 1), (8, 2, 4, 2), (8, 1, 8, 8), (6, 2, 3, 3), (12, 4, 6, 3), (12, 2, 3, 3), (12, 2, 4, 2)],
)
def test_key_heads_are_copied_as_often_as_makes_them_even(heads, kv_heads, ranks, times):
    assert copies(heads, kv_heads, ranks) == times
    copied, per_rank = kv_heads * times, heads // ranks
    for rank in range(ranks):  # what a rank gets are the heads that its queries ask for
        given = [head // times for head in range(rank * copied // ranks, (rank + 1) * copied // ranks)]
        asked = [head // (heads // kv_heads) for head in range(rank * per_rank, (rank + 1) * per_rank)]
        assert [given[head * len(given) // per_rank] for head in range(per_rank)] == asked


def heads_of_rows(num_heads, kv_heads, dtype):
    generator = torch.Generator().manual_seed(2)
    sizes = (num_heads, kv_heads, kv_heads, num_heads)
    shape = dict(dtype=dtype, generator=generator)
    return [torch.randn(ROWS, LENGTH, n, CHANNELS, **shape).transpose(1, 2).detach() for n in sizes]


def compare(kind, num_heads, kv_heads, window, isolated, probability, dtype):
    """On each rank: the largest difference of its output and of its gradients from those of whole rows."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    context = Context(mesh, mesh.get_local_rank(), mesh.size(), kind)
    *whole, weights = heads_of_rows(num_heads, kv_heads, dtype)
    documents = find_documents(STARTS, LENGTH) if isolated else None
    for x in whole:
        x.requires_grad_()
    expected = attend(*whole, AttentionLayout(0, window, documents), probability, KEYS)
    wanted = torch.autograd.grad((expected * weights).sum(), whole)
    places = context.zigzag.take(torch.arange(LENGTH))
    mine = [x.detach()[:, :, places].requires_grad_() for x in whole]
    found = context.slice_documents(STARTS if isolated else None, ROWS, LENGTH, torch.device("cpu"))
    out = attend(
        *mine, AttentionLayout(0, window, documents, context=context, slice_documents=found), probability, KEYS
    )
    given = torch.autograd.grad((out * weights[:, :, places]).sum(), mine)
    found = [(out - expected[:, :, places]).abs().max()]
    found += [(ours - theirs[:, :, places]).abs().max() for ours, theirs in zip(given, wanted, strict=True)]
    return out.dtype, max(map(float, found))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "ranks_and_heads", [(2, 4, 2), (3, 6, 2), pytest.param((4, 4, 1), marks=pytest.mark.long)], ids=str
)
@pytest.mark.parametrize(
    ("window", "isolated", "probability"),
    [(None, False, 0.0), (5, False, 0.0), (None, True, 0.0), (5, True, 0.0), (None, False, 0.3), (5, True, 0.3)],
)
def test_it_is_the_attention_of_whole_rows(ranks, kind, ranks_and_heads, window, isolated, probability):
    world, *heads = ranks_and_heads
    case = (kind, *heads, window, isolated, probability, torch.float64)
    for dtype, difference in ranks.run(world, compare, *case):
        assert dtype == torch.float64 and difference < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_attention_of_whole_rows_in_fp32(ranks, kind):
    for dtype, difference in ranks.run(4, compare, kind, 8, 2, None, True, 0.0, torch.float32):
        assert dtype == torch.float32 and difference < 1e-5
