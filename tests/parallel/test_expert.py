"""Expert parallelism: messages as its docstring counts them, the exchange against experts at home, what is where."""

import warnings
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.parallel import tiny
from windlass.model.moe import Experts, gather_rows
from windlass.parallel.expert import AllToAll, cut_dim

LENGTH, LAYERS, EXPERTS, CHOSEN, HIDDEN = 8, 3, 6, 2, 24
MODEL = {
    **{key: value for key, value in tiny.MODEL.items() if key != "intermediate_size"},
    "family": "qwen3_moe",
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": 12,
    "output_router_logits": True,
}
ROWS = LENGTH * CHOSEN


def watched(world, micro_batches, **parallel):
    """On one of `world` ranks: calls and bytes of all-to-alls in a step, those that only evaluation has, and what is held."""
    program = tiny.make_program(world, model=MODEL, **parallel)
    send, messages = dist.all_to_all_single, []

    def counted(out, given, *args, **kwargs):
        messages.append((given.dtype, given.numel() * given.element_size()))
        return send(out, given, *args, **kwargs)

    batches = [tiny.batch(program.mesh.batch_rank * micro_batches + index) for index in range(micro_batches)]
    with mock.patch.object(dist, "all_to_all_single", counted):
        program.run(batches, torch.tensor(LENGTH * micro_batches * world))
        trained, messages[:] = list(messages), []
        program.evaluate(batches)
    held = {r.name: (tuple(r.tensor.to_local().shape), r.tensor.device_mesh.mesh_dim_names) for r in program.records()}
    return trained, messages, held


def totals(messages):
    """calls and bytes of counts (integers) and of rows."""
    kinds = Counter()
    for dtype, size in messages:
        kind = "rows" if dtype.is_floating_point else "counts"
        kinds[f"{kind} calls"] += 1
        kinds[f"{kind} bytes"] += size
    return kinds


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("selective", 0), ("full", 1)])
def test_messages_of_a_step_are_those_of_the_docstring(ranks, recompute, again):
    results = ranks.run(2, watched_with, 2, 2, {"expert": 2, "shard": 2, "recompute": recompute})
    per_step = LAYERS * 2  # sparse layers x micro-batches
    trained = [totals(trained) for trained, _, _ in results]
    scored = [totals(scored) for _, scored, _ in results]
    for kinds in trained:
        assert kinds["counts calls"] == per_step * (1 + again)
        assert kinds["counts bytes"] == per_step * (1 + again) * EXPERTS * 8
        assert kinds["rows calls"] == per_step * (4 + 2 * again)
    # a rank sends R rows there and, in backward, their gradients there again; what came goes back twice: R on average
    row = HIDDEN * 4
    assert sum(kinds["rows bytes"] for kinds in trained) == 2 * per_step * (4 + 2 * again) * ROWS * row
    assert sum(kinds["rows bytes"] for kinds in scored) == 2 * per_step * 2 * ROWS * row
    assert all(kinds["rows calls"] == per_step * 2 for kinds in scored)


def watched_with(world, micro_batches, parallel):
    return watched(world, micro_batches, **parallel)


def test_nobody_exchanges_without_expert_ranks(ranks):
    for trained, scored, _ in ranks.run(2, watched_with, 2, 1, {"shard": 2}):
        assert not trained and not scored


def test_each_expert_is_on_one_rank_of_expert_and_is_cut_over_the_others(ranks):
    up = "model.layers.0.mlp.experts.up_proj.weight"
    for _, _, held in ranks.run(4, watched_with, 4, 1, {"expert": 2, "shard": 4}):
        assert held[up] == ((3, 6, 24), ("expert_fsdp", "expert")), "three experts over two ranks: by channels"
        assert held["model.layers.0.self_attn.q_proj.weight"] == ((6, 24), ("fsdp",))
        assert held["model.layers.0.mlp.gate.weight"][1] == ("fsdp",)


def exchanged(seed):
    """On one of two ranks: rows sent to dealt-out experts and back, forward and backward, and the same at home."""
    torch.manual_seed(seed)
    matrices = torch.randn(EXPERTS, 4, 4, dtype=torch.float64)
    rank = dist.get_rank()
    counts = torch.tensor([[5, 0, 1, 0, 0, 2], [0, 0, 0, 3, 0, 4]][rank])
    rows = torch.randn(int(counts.sum()), 4, dtype=torch.float64, requires_grad=True)

    def compute(own):
        def of(rows, order, inverse, counts):
            pieces = gather_rows(rows, order, inverse).split(counts.tolist())
            return torch.cat([part @ m for part, m in zip(pieces, own, strict=True)])

        return of

    out = AllToAll(dist.group.WORLD)(rows, counts, compute(matrices[3 * rank : 3 * rank + 3]))
    as_they_are = torch.arange(len(rows))
    expected = compute(matrices)(rows, as_they_are, as_they_are, counts)
    weight = torch.linspace(1, 2, out.numel(), dtype=torch.float64).view_as(out)
    (got,) = torch.autograd.grad((out * weight).sum(), rows)
    (theirs,) = torch.autograd.grad((expected * weight).sum(), rows)
    return (out - expected).abs().max().item(), (got - theirs).abs().max().item()


def test_rows_of_uneven_and_of_no_size_come_back_in_their_order(ranks):
    """Rank 0 sends 2 rows to rank 1's experts, which gives it none."""
    for forward, backward in ranks.run(2, exchanged, 3):
        assert forward <= 1e-13 and backward <= 1e-13


def test_experts_are_cut_along_the_first_dim_that_divides():
    def dim(shape, ranks):
        found = cut_dim(torch.nn.Parameter(torch.empty(shape, device="meta")), ranks)
        return None if found is None else found.dim

    assert dim((128, 768, 2048), 8) == 0
    assert dim((128, 768, 2048), 96) == 1
    assert dim((16, 9, 64), 64) == 2
    assert dim((5, 7, 9), 2) is None and dim((128, 64), 96) is None


def test_experts_stay_plain_where_nothing_cuts_them(ranks):
    (plain,) = ranks.run(1, is_plain)
    assert plain


def is_plain():
    program = tiny.make_program(1, model=MODEL)
    experts = [module for module in program.model.modules() if isinstance(module, Experts)]
    return all(one.exchange is None and one.finish is None for one in experts) and not any(
        isinstance(record.tensor, DTensor) for record in program.records()
    )


def warned(world, parallel):
    """On one of `world` ranks: what is warned of in a step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = tiny.make_program(world, model=MODEL, **parallel)
        program.run([tiny.batch(program.mesh.batch_rank)], torch.tensor(LENGTH * world))
    return {str(one.message) for one in caught}


def test_units_of_experts_return_no_view(ranks):
    """FSDP2 warns that gradients may be wrong behind one."""
    for found in ranks.run(2, warned, 2, {"expert": 2, "shard": 2}):
        assert not any("view" in message for message in found), found
