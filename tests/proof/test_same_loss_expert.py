"""Mixtures of experts train what one process of torch and transformers trains, however they are cut: losses, the routers' losses,
norms, every gradient of the first step, weights after three. Six experts, three per token; a dense layer between two sparse ones;
rows of 12 tokens with uneven masks, one of which counts nothing."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import cases
from tests.cases import Layout
from tests.proof.test_same_loss import DTYPE, TOLERANCE, assert_every_number
from windlass.model.moe import Experts
from windlass.model.routing import Routing
from windlass.optim import clip
from windlass.parallel import expert
from windlass.parallel.program import ShardedProgram
from windlass.parallel.routers import Routers
from windlass.proof.pool import RankFailed
from windlass.proof.reference import train_reference

LENGTH = 12
MODELS = {
    "sparse": {},
    "deep": {"num_hidden_layers": 5, "mlp_only_layers": [0], "tie_word_embeddings": True},  # stages are unequal
    "even": {"num_hidden_layers": 2, "mlp_only_layers": [], "num_experts": 8, "moe_intermediate_size": 16},
}
OWN = ("recompute", "compile", "micro_batch", "packed", "policy", "optim")


def cut(*, expert=1, context=1, shard=1, replicate=1, tp=1, pp=1, zero=3, **more):
    """`more`: fields of Layout (OWN), the rest ParallelConfig's."""
    axes = {"expert": expert, "context": context, "tp": tp, "pp": pp}
    axes = {name: size for name, size in axes.items() if size > 1}
    given = {name: more.pop(name) for name in OWN if name in more}
    world = context * shard * replicate * tp * pp
    return Layout(world, zero, replicate, shard, sharding=(*axes.items(), *more.items()), length=LENGTH, **given)


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    @functools.cache
    def write(model):
        fields = {**MODELS[model]}
        tied = fields.pop("tie_word_embeddings", False)
        return cases.write_model(tmp_path_factory.mktemp(f"experts-{model}"), "qwen3_moe", tied, **fields)

    @functools.cache
    def make(model, policy, packed):
        batches = cases.packed_batches(LENGTH) if packed else cases.global_batches(LENGTH)
        return write(model), train_reference(write(model), batches, DTYPE[policy], cases.SETTINGS)

    return make


def run(ranks, reference, model, case, function=cases.train_layout, *first):
    directory, trace = reference(model, case.policy, case.packed)
    limit_s = 300 if case.compile or case.world > 8 else 120
    results = ranks.run(case.world, function, *first, str(directory), case, timeout_s=limit_s)
    tolerance = TOLERANCE[case.policy]
    assert_every_number(results, trace, directory, case.policy)
    for result in results:
        for figures, expected in zip(result["figures"], trace.figures, strict=True):
            assert figures.keys() == expected.keys()
            for name, value in expected.items():
                assert (
                    torch.tensor(figures[name], dtype=torch.float64) - value
                ).abs().max() <= tolerance * value.abs().max(), name
    return results[0], trace


QUICK = {"zero3", "tp2", "expert2-fsdp2", "pp2-expert2"}


def rows(table):
    """Each cell, long unless it is quick."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in table]


WHOLE = {
    "one": dict(micro_batch=8),
    "one-accumulated": dict(),
    "ddp2": dict(zero=0, replicate=2),
    "zero3": dict(shard=2),
    "zero2": dict(shard=2, micro_batch=1, zero=2),
    "zero1": dict(shard=2, micro_batch=1, zero=1),
    "zero3-4": dict(shard=4, micro_batch=1),
    "hsdp2x2": dict(replicate=2, shard=2),
    "tp2": dict(tp=2, micro_batch=8),
    "tp2-zero3": dict(tp=2, shard=2),
    "tp2-replicate2": dict(tp=2, replicate=2),
    "context2": dict(context=2),
    "context2-shard2-packed": dict(context=2, shard=2, packed=True),
    "context2-tp2": dict(context=2, tp=2),
    "recompute-full": dict(shard=2, recompute="full"),
    "recompute-selective": dict(shard=2, recompute="selective"),
    "offload": dict(shard=2, offload=True),
    "units-of-2-prefetch": dict(shard=2, blocks_per_unit=2, prefetch=1),
    "packed": dict(shard=2, packed=True),
}


@pytest.mark.parametrize("name", rows(WHOLE))
def test_whole_experts(ranks, reference, name):
    run(ranks, reference, "sparse", cut(**WHOLE[name]))


DEALT = {
    "expert2": dict(expert=2, shard=2),
    "expert2-zero2": dict(expert=2, shard=2, micro_batch=1, zero=2),
    "expert2-zero1": dict(expert=2, shard=2, micro_batch=1, zero=1),
    "expert2-fsdp2": dict(expert=2, shard=4, micro_batch=1),
    "expert2-replicate2": dict(expert=2, shard=2, replicate=2),
    "expert2-fsdp2-replicate2": dict(expert=2, shard=4, replicate=2, micro_batch=1),
    "expert3": dict(expert=3, context=3),
    "expert2-over-context": dict(expert=2, context=2),
    "expert4-over-both": dict(expert=2, shard=2, context=2, packed=True),
    "expert2-tp2": dict(expert=2, shard=2, tp=2),
    "expert2-fsdp2-tp2": dict(expert=2, shard=4, tp=2, micro_batch=1),
    "expert2-recompute-full": dict(expert=2, shard=2, recompute="full"),
    "expert2-offload": dict(expert=2, shard=2, offload=True),
    "expert2-units-of-2-prefetch": dict(expert=2, shard=2, blocks_per_unit=2, prefetch=1),
    "expert2-packed": dict(expert=2, shard=2, packed=True),
}


@pytest.mark.parametrize("name", rows(DEALT))
def test_experts_dealt_out(ranks, reference, name):
    run(ranks, reference, "sparse", cut(**DEALT[name]))


STAGED = {
    "pp2": dict(pp=2, zero=1, micro_batch=1),
    "pp2-ddp": dict(pp=2, zero=0, replicate=2, micro_batch=1),
    "pp2-gpipe-shard2": dict(pp=2, zero=1, shard=2, micro_batch=1, schedule="gpipe"),
    "pp2-zbv": dict(pp=2, zero=1, micro_batch=1, schedule="zbv"),
    "pp2-interleaved": dict(pp=2, zero=1, micro_batch=1, schedule="interleaved-1f1b"),
    "pp2-zero-bubble": dict(pp=2, zero=1, micro_batch=1, schedule="interleaved-zero-bubble"),
    "pp2-tp2": dict(pp=2, tp=2, zero=1, micro_batch=1),
    "pp2-context2": dict(pp=2, context=2, zero=1, micro_batch=1),
    "pp2-recompute-full": dict(pp=2, zero=1, micro_batch=1, recompute="full"),
    "pp2-expert2": dict(pp=2, expert=2, shard=2, zero=1, micro_batch=1),
    "pp2-expert2-zbv": dict(pp=2, expert=2, shard=2, zero=1, micro_batch=1, schedule="zbv"),
    "pp2-expert2-zero-bubble": dict(pp=2, expert=2, shard=2, zero=1, micro_batch=1, schedule="interleaved-zero-bubble"),
    "pp2-expert2-fsdp2": dict(pp=2, expert=2, shard=4, zero=1, micro_batch=1),
    "pp2-expert2-tp2": dict(pp=2, expert=2, shard=2, tp=2, zero=1, micro_batch=1),
    "pp2-expert2-context2-recompute-full": dict(pp=2, expert=2, context=2, zero=1, micro_batch=1, recompute="full"),
}


@pytest.mark.parametrize("name", rows(STAGED))
def test_beside_a_pipeline(ranks, reference, name):
    run(ranks, reference, "deep", cut(**STAGED[name]))


IN_FP32 = {
    "one": dict(micro_batch=8),
    "ddp2": dict(zero=0, replicate=2),
    "tp2-zero3": dict(tp=2, shard=2),
    "expert2": dict(expert=2, shard=2),
    "expert2-replicate2": dict(expert=2, shard=2, replicate=2),
    "pp2": dict(pp=2, zero=1, micro_batch=1),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "one" else pytest.mark.long) for name in IN_FP32]
)
def test_fp32_with_the_grouped_product(ranks, reference, name):
    run(ranks, reference, "even", cut(**IN_FP32[name], policy="fp32"))


@pytest.mark.long
@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16-pure"])
@pytest.mark.parametrize("name", ["zero3", "expert2", "ddp2"])
def test_16_bits_stay_within_their_tolerance(ranks, reference, name, policy):
    """The first step: later ones may route a token elsewhere, where two experts are near a tie."""
    check_16_bits(ranks, reference, cut(**{**WHOLE, **DEALT}[name], policy=policy))


@pytest.mark.long
@pytest.mark.parametrize("name", ["one", "tp2-zero3", "recompute-full"])
def test_compiled(ranks, reference, name):
    check_16_bits(ranks, reference, cut(**WHOLE[name], policy="bf16", compile=True))


def check_16_bits(ranks, reference, case):
    directory, trace = reference("even", "fp32", False)
    for result in ranks.run(case.world, cases.train_layout, str(directory), case, timeout_s=300):
        assert abs(result["losses"][0] - trace.losses[0]) <= 3e-3 * trace.losses[0]
        assert abs(result["norms"][0] - trace.norms[0]) <= 3e-2 * trace.norms[0]


# ---- mutations: each turns a row red


def nothing():
    return contextlib.nullcontext()


def _after_begin(change):
    """`change(routers, part)` is done to every part when a global batch begins."""
    begin = Routers.begin

    def changed(self, *args):
        begin(self, *args)
        for part in self._parts:
            change(self, part)

    return mock.patch.object(Routers, "begin", changed)


def router_loss_averaged_over_ranks():
    def change(routers, part):
        part.routing.scale = part.routing.scale / routers._mesh.loss_group.size()

    return _after_begin(change)


def router_loss_on_every_tensor_rank():
    return _after_begin(lambda _routers, part: setattr(part.routing, "parts", 1))


def counts_of_this_ranks_tokens():
    return _after_begin(lambda _routers, part: setattr(part.routing, "sum_counts", None))


def router_loss_of_the_last_stage():
    def change(_routers, part):
        part.routing.scale = part.routing.scale * part.last

    return _after_begin(change)


def router_loss_over_the_micro_batch():
    """All rows joined before counts and probabilities are multiplied, as transformers does."""
    collect = Routing.collect

    def joined(self, hidden, routed):
        return collect(self, hidden, tuple(sums.sum(0, keepdim=True) for sums in routed))

    return mock.patch.object(Routing, "collect", joined)


def expert_gradients_summed_over_expert():
    run = ShardedProgram.run

    def changed(self, *args):
        loss = run(self, *args)
        for record in self.records():
            if ".experts." in record.name:
                dist.all_reduce(record.tensor.grad.to_local(), group=self.mesh.expert["expert"].get_group())
        return loss

    return mock.patch.object(ShardedProgram, "run", changed)


def weights_applied_twice():
    forward = Experts.forward
    return mock.patch.object(Experts, "forward", lambda self, hidden, chosen, w: forward(self, hidden, chosen, w * w))


def experts_counted_twice_in_the_norm():
    norm = clip._norm

    def changed(gradients):
        names = getattr(getattr(gradients[0], "device_mesh", None), "mesh_dim_names", ())
        return norm(gradients) * (2**0.5 if "expert" in names else 1.0)

    return mock.patch.object(clip, "_norm", changed)


def rows_do_not_find_back():
    """The way back is taken for the way there."""
    sort = expert.sort_rows
    return mock.patch.object(expert, "sort_rows", lambda expert_Q: (sort(expert_Q)[0],) * 2)


def rows_left_by_sender():
    def as_they_came(expert_Q):
        return (torch.arange(len(expert_Q)),) * 2

    return mock.patch.object(expert, "sort_rows", as_they_came)


def a_row_too_many_for_an_expert_is_dropped():
    """As with a capacity: what comes beyond it is zero."""
    compute = Experts.compute

    def capped(self, rows, counts):
        place = torch.arange(len(rows)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        return compute(self, rows, counts) * (place < 9)[:, None]

    return mock.patch.object(Experts, "compute", capped)


RED = {
    router_loss_averaged_over_ranks: dict(shard=2),
    router_loss_on_every_tensor_rank: dict(tp=2),
    counts_of_this_ranks_tokens: dict(context=2),
    router_loss_of_the_last_stage: dict(pp=2, zero=1, micro_batch=1),
    router_loss_over_the_micro_batch: dict(shard=2),
    expert_gradients_summed_over_expert: dict(expert=2, shard=2),
    weights_applied_twice: dict(expert=2, shard=2),
    experts_counted_twice_in_the_norm: dict(expert=2, shard=2),
    rows_do_not_find_back: dict(expert=2, shard=2),
    rows_left_by_sender: dict(expert=2, shard=2),
    a_row_too_many_for_an_expert_is_dropped: dict(expert=2, shard=2),
}
QUICK_RED = (expert_gradients_summed_over_expert,)


@pytest.mark.parametrize(
    "mutation",
    [pytest.param(m, marks=() if m in QUICK_RED else pytest.mark.long, id=m.__name__) for m in RED],
)
def test_the_comparison_turns_red(ranks, reference, mutation):
    with pytest.raises(AssertionError) as caught:
        run(ranks, reference, "sparse", cut(**RED[mutation]), cases.train_mutated, mutation)
    assert not isinstance(caught.value, RankFailed), "the ranks trained on; it is the comparison that finds it"


def test_without_a_mutation_it_is_green(ranks, reference):
    run(ranks, reference, "sparse", cut(expert=2, shard=2), cases.train_mutated, nothing)
