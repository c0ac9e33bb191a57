"""Attention inside documents against an explicit softmax, in each of the ways to compute it; borders; what leaks."""

import itertools
import math
from unittest import mock

import pytest
import torch

from tests.model.tiny import hf_model, our_model
from tests.parallel.tiny import Operators
from windlass.model.attention.attend import attend
from windlass.model.attention.causal import repeat_heads
from windlass.model.attention.documents import (
    attend_documents,
    find_documents,
    flash_by_document,
    has_kernel,
)
from windlass.model.attention.layout import AttentionLayout
from windlass.model.chunks import Chunks
from windlass.model.transformer import Decoder

STARTS = torch.tensor([[0, 5, 6, 17], [0, 17, 17, 17], [0, 3, 7, 8]])
LENGTH = 17


def random_heads(kv_heads, dtype=torch.float64):
    """Queries, keys and values as the projections make them: heads of a token side by side."""
    torch.manual_seed(0)
    sizes = (6, kv_heads, kv_heads)
    return [torch.randn(3, LENGTH, n, 10, dtype=dtype).transpose(1, 2).requires_grad_() for n in sizes]


def explicit(q_BHTK, k_BGTK, v_BGTK, window):
    k_BHTK, v_BHTK = repeat_heads(k_BGTK, 6), repeat_heads(v_BGTK, 6)
    unseen_BTT = torch.ones(3, LENGTH, LENGTH, dtype=torch.bool)
    for row, starts in enumerate(STARTS.tolist()):
        for query in range(LENGTH):
            first = max(start for start in starts if start <= query)
            first = first if window is None else max(first, query - window + 1)
            unseen_BTT[row, query, first : query + 1] = False
    scores_BHTT = q_BHTK @ k_BHTK.transpose(-1, -2) / math.sqrt(10)
    return scores_BHTT.masked_fill(unseen_BTT[:, None], -torch.inf).softmax(-1) @ v_BHTK


def without_a_kernel(q_BHTK, k_BGTK, v_BGTK, documents, window):
    layout = AttentionLayout(0, window, documents, chunks=Chunks(attention_weights=5 * 3 * 6 * LENGTH))  # five queries
    with mock.patch("windlass.model.attention.attend.has_kernel", return_value=False):
        return attend(q_BHTK, k_BGTK, v_BGTK, layout)


@pytest.mark.parametrize("way", [attend_documents, without_a_kernel])
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("window", [None, 1, 3, 9, 40])
def test_values_and_gradients_equal_explicit_softmax(way, kv_heads, window):
    heads = random_heads(kv_heads)
    ours, expected = way(*heads, find_documents(STARTS, LENGTH), window), explicit(*heads, window)
    assert (ours - expected).abs().max() < 1e-14
    weights = torch.randn_like(expected)
    given, wanted = (torch.autograd.grad((out * weights).sum(), heads) for out in (ours, expected))
    for ours, theirs in zip(given, wanted, strict=True):
        assert (ours - theirs).abs().max() < 1e-13


def without_a_kernel_after(q_BHTK, k_BGSK, v_BGSK, documents, window):
    with mock.patch("windlass.model.attention.attend.has_kernel", return_value=False):
        return attend(q_BHTK, k_BGSK, v_BGSK, AttentionLayout(k_BGSK.shape[2] - q_BHTK.shape[2], window, documents))


def in_small_masks(q_BHTK, k_BGSK, v_BGSK, documents, window):
    with mock.patch("windlass.model.attention.causal.MASK_ELEMENTS", 3 * LENGTH):
        return attend_documents(q_BHTK, k_BGSK, v_BGSK, documents, window)


@pytest.mark.parametrize("way", [attend_documents, in_small_masks, without_a_kernel_after])
@pytest.mark.parametrize("part", [(0, 6), (1, 17), (5, 17), (6, 9), (8, 16), (16, 17)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 3, 9])
def test_queries_that_are_a_part_of_the_row_see_their_documents_keys(way, part, window):
    """Of rows that go on after the part, too: nothing of what comes later is given."""
    offset, stop = part
    heads = random_heads(3)
    documents = find_documents(STARTS, stop, offset)
    ours = way(heads[0][:, :, offset:stop], *(x[:, :, :stop] for x in heads[1:]), documents, window)
    expected = explicit(*heads, window)[:, :, offset:stop]
    assert (ours - expected).abs().max() < 1e-14
    weights = torch.randn_like(expected)
    given, wanted = (torch.autograd.grad((out * weights).sum(), heads) for out in (ours, expected))
    for ours, theirs in zip(given, wanted, strict=True):
        assert (ours - theirs).abs().max() < 1e-13


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("window", [None, 3])
def test_narrower_dtypes(dtype, tolerance, window):
    heads = random_heads(3, dtype)
    ours = attend(*heads, AttentionLayout(0, window, find_documents(STARTS, LENGTH)))
    expected = explicit(*(x.double() for x in heads), window)
    assert ours.dtype == dtype and (ours - expected).abs().max() <= tolerance
    weights = torch.randn_like(expected)
    given, wanted = (torch.autograd.grad((out * weights).sum(), heads) for out in (ours, expected))
    for gradient, theirs in zip(given, wanted, strict=True):
        assert gradient.dtype == dtype and (gradient - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_the_operator_keeps_torchs_rules_for_operators():
    """Its fake for tracing, its strides and its gradient, with and without a window, by torch's own examination."""
    for window in (None, 3):
        torch.library.opcheck(flash_by_document, (*random_heads(3), STARTS, window))
        q, k, v = random_heads(3)
        end = q[:, :, 4:].detach().requires_grad_()
        torch.library.opcheck(flash_by_document, (end, k, v, STARTS, window))


def test_positions_restart_and_bounds_are_those_of_rows_laid_end_to_end():
    documents = find_documents(STARTS, LENGTH)
    assert documents.positions_BT[0].tolist() == [*range(5), 0, *range(11)]
    assert documents.positions_BT[1].tolist() == [*range(17)]
    assert documents.positions_BT[2].tolist() == [*range(3), *range(4), 0, *range(9)]
    assert documents.bounds_N.dtype == torch.int32
    assert documents.bounds_N.tolist() == [0, 5, 6, 17, 17, 34, 34, 34, 34, 37, 41, 42, 51]
    assert documents.key_bounds_N is documents.bounds_N


def test_bounds_of_a_part_of_each_row_are_those_of_its_queries_and_of_the_keys_up_to_its_end():
    documents = find_documents(STARTS, 8, 4)
    assert documents.starts_BM.tolist() == [[0, 5, 6, 8], [0, 8, 8, 8], [0, 3, 7, 8]]
    assert documents.first_BT.tolist() == [[0, 5, 6, 6], [0, 0, 0, 0], [3, 3, 3, 7]]
    assert documents.bounds_N.tolist() == [0, 1, 2, 4, 4, 8, 8, 8, 8, 8, 11, 12, 12]
    assert documents.key_bounds_N.tolist() == [0, 5, 6, 8, 8, 16, 16, 16, 16, 19, 23, 24, 24]


@pytest.mark.parametrize("starts", [[1, 5], [0, 18], [0, 9, 5]])
def test_borders_that_are_none_are_our_own_bug(starts):
    documents = find_documents(torch.tensor([[0] * len(starts)]), LENGTH)
    documents.starts_BM[0] = torch.tensor(starts)
    heads = [x[:1] for x in random_heads(3)]
    with pytest.raises(AssertionError, match=", ".join(map(str, starts))):
        attend_documents(*heads, documents, None)


@pytest.mark.parametrize("window", [None, 4])
def test_nothing_crosses_a_border_bit_for_bit(window):
    heads = [x.detach() for x in random_heads(3, torch.float32)]
    documents = find_documents(STARTS[2:].repeat(3, 1), LENGTH)
    before = attend_documents(*heads, documents, window)
    for x in heads:
        x[:, :, 4] += 1  # the second token of the second document, [3, 7)
    after = attend_documents(*heads, documents, window)
    changed_T = (before != after).flatten(0, 1).any(-1).any(0)
    assert changed_T.nonzero().flatten().tolist() == [4, 5, 6]


@pytest.mark.parametrize(("window", "sees_back"), [(None, (-1, 0)), (5, (4, 0)), (17, (-1, 0)), (1, (0, 0))])
@pytest.mark.parametrize("takes_groups", [True, False])
@pytest.mark.parametrize("offset", [0, 7])
def test_what_the_kernel_for_gpus_is_asked(window, sees_back, takes_groups, offset):
    """It runs on no CPU; a replacement answers from what it is given, for torch versions with and without grouped heads."""
    q, k, v = random_heads(3)
    given = {}

    def varlen(q_NHK, k_NGK, v_NGK, bounds_q, bounds_k, longest_q, longest_k, *, window_size, enable_gqa=False):
        given.update(window_size=window_size, enable_gqa=enable_gqa, heads=k_NGK.shape[1])
        assert (longest_q, longest_k) == (LENGTH - offset, LENGTH)
        out_NHK = torch.empty_like(q_NHK)
        back = None if window_size[0] == -1 else window_size[0] + 1
        spans = [[slice(*pair) for pair in itertools.pairwise(bounds.tolist())] for bounds in (bounds_q, bounds_k)]
        for queries, keys in zip(*spans, strict=True):
            q, k, v = (x[at].transpose(0, 1)[None] for x, at in ((q_NHK, queries), (k_NGK, keys), (v_NGK, keys)))
            if q.shape[2]:  # the last query is over the last key
                out_NHK[queries] = attend(q, k, v, AttentionLayout(k.shape[2] - q.shape[2], back))[0].transpose(0, 1)
        return out_NHK

    from windlass.model.attention import documents as attention_documents

    documents = find_documents(STARTS, LENGTH, offset)
    with (
        mock.patch("torch.nn.attention.varlen.varlen_attn", varlen),
        mock.patch.object(attention_documents, "TAKES_GROUPS", takes_groups),
    ):
        out = attention_documents.attend_varlen(q[:, :, offset:], k, v, documents, window)
    assert (out - explicit(q, k, v, window)[:, :, offset:]).abs().max() < 1e-14
    assert given == {"window_size": sees_back, "enable_gqa": takes_groups, "heads": 3 if takes_groups else 6}


def on_no_device(family):
    """A decoder and a batch of tensors that hold nothing: they take the way of a GPU, and a host read of one fails."""
    arch = our_model(hf_model(family, True)).arch
    with torch.device("meta"):
        ids_BT, starts_BM = torch.zeros(2, LENGTH, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)
        return Decoder(arch).bfloat16(), {"input_ids": ids_BT, "targets": ids_BT, "documents": starts_BM}


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_the_way_of_a_gpu_reads_nothing_and_gives_torchs_kernel_what_it_takes(family):
    decoder, batch = on_no_device(family)
    with Operators() as operators:
        decoder(**batch).backward()
    found = {name: count for name, count in operators.calls.items() if "attn" in name or "attention" in name}
    assert found == {"torch_attn::varlen_attn": 3, "torch_attn::varlen_attn_backward": 3}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it, and hides it from users
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_way_of_a_gpu_is_one_graph(family):
    decoder, batch = on_no_device(family)
    graphs = []

    def count(graph, inputs):
        graphs.append(str(graph.code))
        return graph.forward

    torch._dynamo.reset()
    for block in decoder.blocks:
        block.compile(fullgraph=True, backend=count)
    decoder(**batch).backward()
    assert len(graphs) == 1 and graphs[0].count("varlen_attn(") == 1
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "has"),
    [
        (torch.bfloat16, 128, True),
        (torch.float16, 256, True),
        (torch.float32, 128, False),
        (torch.float64, 128, False),
        (torch.bfloat16, 10, False),
        (torch.bfloat16, 264, False),
    ],
)
def test_what_has_a_kernel_for_several_sequences(dtype, head_dim, has):
    assert has_kernel(torch.empty(1, 1, 1, head_dim, dtype=dtype, device="meta")) is has
    assert has_kernel(torch.empty(1, 1, 1, head_dim, dtype=dtype))
