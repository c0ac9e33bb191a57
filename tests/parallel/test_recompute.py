"""Recomputation changes no number: it keeps less, and repeats what it says it repeats."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch._logging._internal import warning_once

from tests.parallel.test_expert import MODEL as EXPERTS
from tests.parallel.tiny import BLOCKS, Operators, assert_equal, batch, gradients, make_program
from windlass.parallel.recompute import KEPT, apply_recompute

LAYOUT = {0: (2, 0, 2, 1), 3: (2, 3, 1, 2)}


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("zero", [0, 3])
def test_recomputation_changes_no_gradient(ranks, recompute, zero):
    plain = ranks.run(2, gradients, *LAYOUT[zero])[0]
    again = ranks.run(2, gradients_with, recompute, *LAYOUT[zero])[0]
    assert_equal(plain, again, 0.0)


def gradients_with(recompute, *layout):
    return gradients(*layout, recompute=recompute)


def saved_bytes(recompute):
    """Bytes that autograd keeps of one forward, parameters aside."""
    program = make_program(1, recompute=recompute)
    own = {record.tensor.untyped_storage().data_ptr() for record in program.records()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = program.model(**batch())
    del loss
    return sum(kept.values())


def count_documents(recompute):
    """Calls of attention over documents in forward and backward, and the gradients, of rows with borders."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Attentions(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(str(function))
            return function(*args, **(kwargs or {}))

    program = make_program(1, recompute=recompute)
    with Attentions():
        program.run([{**batch(), "documents": torch.tensor([[0, 3, 8]])}], torch.tensor(8.0))
    return calls.count("windlass.flash_by_document.default"), {r.name: r.tensor.grad for r in program.records()}


def test_selective_keeps_attention_over_documents_too(ranks):
    (none, plain), (selective, again), (full, _) = (
        ranks.run(1, count_documents, kind)[0] for kind in ("none", "selective", "full")
    )
    assert (none, selective, full) == (BLOCKS, BLOCKS, 2 * BLOCKS)
    assert all(torch.equal(gradient, again[name]) for name, gradient in plain.items())


def test_every_kept_operator_exists():
    import torch.nn.attention.varlen

    import windlass.model.attention.documents  # noqa: F401  makes its operator

    for name in KEPT:
        space, operator, overload = name.split(".")
        assert str(getattr(getattr(getattr(torch.ops, space), operator), overload)) == name


def test_full_recomputation_keeps_least_and_none_most(ranks):
    kept = {kind: ranks.run(1, saved_bytes, kind)[0] for kind in ("none", "full")}
    assert kept["full"] < 0.5 * kept["none"], kept


def count_operators(recompute):
    program = make_program(1, recompute=recompute)
    with Operators() as mode:
        program.run([batch()], torch.tensor(8.0))
    return mode.calls


def test_selective_repeats_the_cheap_operators_and_no_matrix_product(ranks):
    none, selective, full = (ranks.run(1, count_operators, kind)[0] for kind in ("none", "selective", "full"))
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    for product in ("mm", attention):
        assert none[product] == selective[product] < full[product], product
    assert none["silu"] < selective["silu"] == full["silu"]


def count_of_experts(recompute, expert):
    program = make_program(2, model=EXPERTS, shard=2, expert=expert, recompute=recompute)
    with Operators() as mode:
        program.run([batch()], torch.tensor(16.0))
    return mode.calls


@pytest.mark.parametrize("expert", [1, 2])
def test_selective_repeats_no_product_of_experts(ranks, expert):
    none, selective, full = (ranks.run(2, count_of_experts, kind, expert)[0] for kind in ("none", "selective", "full"))
    for product in ("mm", "_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu"):
        assert none[product] == selective[product] < full[product], product
    assert none["silu"] < selective["silu"] == full["silu"]


def test_a_compiled_block_with_selective_says_nothing_of_torch(monkeypatch):
    logger, records = logging.getLogger("torch._higher_order_ops.wrap"), []
    logger.setLevel(logging.NOTSET)  # as torch has it
    warning_once.cache_clear()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    logger.addHandler(handler)
    block = SimpleNamespace(forward=torch.nn.Linear(2, 2).forward, mlp=None)
    apply_recompute([block], ["selective"])
    torch.compile(block.forward, backend="aot_eager")(torch.ones(1, 2)).sum().backward()
    logger.removeHandler(handler)
    assert records == []
