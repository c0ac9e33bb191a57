"""The compiled pass: the operators' numbers, however many sizes of chunks."""

import shutil

import pytest
import torch

from tests.model.head.test_loss import loss_and_gradients, make_head
from windlass.model.head.loss import factor_bits


def needs_compiler(test):
    test = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")(test)
    return pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")(
        test
    )  # the compiler's own imports


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 3e-6), (torch.bfloat16, 2**-8)]
)
def test_one_compiled_pass_is_as_exact_as_the_operators(dtype, tolerance):
    """bf16: the wide gradient is rounded once, so an element is off by a step at most."""
    for cap in (None, 3.0):
        torch._dynamo.reset()
        head, hidden_BTD, targets_BT = make_head(dtype)
        head.cap, head.chunk_tokens = cap, 7
        factor = factor_bits(torch.tensor(21), dtype)
        operators = loss_and_gradients(head, hidden_BTD, targets_BT, factor=factor)
        scores = head(hidden_BTD, targets_BT, by_row=True)
        head.compile_loss(7 * 256, 8192)
        assert head.chunk_tokens == 7
        compiled = loss_and_gradients(head, hidden_BTD, targets_BT, factor=factor)
        assert abs(compiled[0] - operators[0]) <= (1e-13 if dtype == torch.float64 else 1e-5) * operators[0]
        for ours, theirs in zip(compiled[1:], operators[1:], strict=True):
            assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()
        assert compiled[2][211:].count_nonzero() == 0
        assert torch.allclose(head(hidden_BTD, targets_BT, by_row=True), scores, rtol=1e-5)


@needs_compiler
def test_a_compiled_pass_is_two_graphs_whatever_the_sizes_of_chunks():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    head, hidden_BTD, targets_BT = make_head(torch.float32)
    head.compile_loss(7 * 256, 8192)
    for tokens in (26, 26, 23, 18):  # rests of 5, 2 and 4; one token would be a third
        rows = hidden_BTD.flatten(0, 1)[:tokens][None], targets_BT.flatten()[:tokens][None]
        head(*rows).backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_every_head_has_a_code_object_of_its_own():
    """dynamo counts graphs by it, and raises at the ninth: the tenth model of a notebook would not train."""
    heads = [make_head(torch.float32)[0] for _ in range(2)]
    for head in heads:
        head.compile_loss(7 * 256, 8192)
    codes = [head._one_pass._torchdynamo_orig_callable.__code__ for head in heads]
    assert codes[0] is not codes[1]
