"""Tensor and sequence parallel layouts train what one process of torch and transformers trains: losses, norms, every gradient of
the first step, weights after three. Rows as in test_same_loss, but of 12 tokens, which tp divides."""

import contextlib
import functools
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

from tests import cases
from tests.cases import Layout
from tests.proof.test_same_loss import DTYPE, MODELS, assert_every_number
from windlass.model.loss import Cut
from windlass.model.transformer import Decoder
from windlass.optim import muon
from windlass.optim.config import OptimConfig
from windlass.parallel import ddp, program, tensor
from windlass.parallel.mesh import Mesh
from windlass.proof.pool import RankFailed
from windlass.proof.reference import train_reference
from windlass.units import MIB

LENGTH = 12
FIELDS = {"gpt2": {"n_head": 4}}  # of 9 channels
TP = (("tp", 2),)

LAYOUTS = {
    "tp2": Layout(2, zero=3, replicate=1, shard=1, micro_batch=8, sharding=TP),
    "tp2-accumulated": Layout(2, zero=3, replicate=1, shard=1, sharding=TP),
    "tp2-zero3": Layout(4, zero=3, replicate=1, shard=2, sharding=TP),
    "tp2-zero2": Layout(4, zero=2, replicate=1, shard=2, sharding=TP),
    "tp2-zero1": Layout(4, zero=1, replicate=1, shard=2, micro_batch=1, sharding=TP),
    "tp2-zero3-uneven": Layout(8, zero=3, replicate=1, shard=4, micro_batch=1, sharding=TP),
    "tp2-zero3-recompute-full": Layout(4, zero=3, replicate=1, shard=2, recompute="full", sharding=TP),
    "tp2-recompute-selective": Layout(2, zero=3, replicate=1, shard=1, recompute="selective", sharding=TP),
    "tp2-hsdp2x2": Layout(8, zero=3, replicate=2, shard=2, micro_batch=1, sharding=TP),
    "tp2-offload": Layout(4, zero=3, replicate=1, shard=2, sharding=(*TP, ("offload", True))),
    "tp2-units-of-2-prefetch": Layout(
        4, zero=3, replicate=1, shard=2, sharding=(*TP, ("blocks_per_unit", 2), ("prefetch", 1))
    ),
    "tp2-replicate2": Layout(4, zero=3, replicate=2, shard=1, sharding=TP),
    "tp2-ddp": Layout(2, zero=0, replicate=1, shard=1, micro_batch=4, sharding=TP),
    "tp2-ddp2": Layout(4, zero=0, replicate=2, shard=1, sharding=TP),
    "tp2-ddp2-buckets-recomputed": Layout(
        4, zero=0, replicate=2, shard=1, micro_batch=1, recompute="full", sharding=(*TP, ("bucket_mib", 1))
    ),
}
QUICK = {
    ("qwen3", True): {"tp2", "tp2-zero3", "tp2-ddp2"},
    ("llama", False): {"tp2"},
    ("gpt2", True): {"tp2-zero3"},
}
"""Of each model. The rest is long."""
CELLS = [
    pytest.param(*model, name, marks=() if name in QUICK.get(model, ()) else pytest.mark.long)
    for model in MODELS
    for name in LAYOUTS
]


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    @functools.cache
    def make(family, tied, policy):
        place = tmp_path_factory.mktemp(f"{family}-{tied}")
        directory = cases.write_model(place, family, tied, **FIELDS.get(family, {}))
        return directory, train_reference(directory, cases.global_batches(LENGTH), DTYPE[policy], cases.SETTINGS)

    return make


def run(ranks, reference, family, tied, case, **limit):
    directory, trace = reference(family, tied, case.policy)
    case = Layout(**{**vars(case), "length": LENGTH})
    results = ranks.run(case.world, cases.train_layout, str(directory), case, **limit)
    assert_every_number(results, trace, directory, case.policy)
    return results[0], trace


@pytest.mark.parametrize(("family", "tied", "layout"), CELLS)
def test_fp64(ranks, reference, family, tied, layout):
    run(ranks, reference, family, tied, LAYOUTS[layout])


@pytest.mark.parametrize(
    "layout",
    [
        "tp2-zero3",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("tp2-accumulated", "tp2-replicate2", "tp2-ddp2")),
    ],
)
def test_fp32(ranks, reference, layout):
    run(ranks, reference, "qwen3", True, Layout(**{**vars(LAYOUTS[layout]), "policy": "fp32"}))


@pytest.mark.long
@pytest.mark.parametrize("layout", ["tp2-zero3", "tp2-ddp2"])
def test_compiled(ranks, reference, layout):
    run(ranks, reference, "qwen3", True, Layout(**{**vars(LAYOUTS[layout]), "compile": True}))


MUON = OptimConfig.model_validate(cases.OPTIM.model_dump() | {"kind": "muon"})


@pytest.fixture(scope="session")
def muon_reference(tmp_path_factory):
    @functools.cache
    def make(family):
        directory = cases.write_model(tmp_path_factory.mktemp(f"{family}-muon"), family, True, **FIELDS.get(family, {}))
        settings = replace(cases.SETTINGS, muon=True)
        return directory, train_reference(directory, cases.global_batches(LENGTH), torch.float64, settings)

    return make


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", "tp2-zero3"),
        *(
            pytest.param(family, layout, marks=pytest.mark.long)
            for family, layout in [
                ("qwen3", "tp2"),
                ("qwen3", "tp2-zero3-uneven"),
                ("qwen3", "tp2-hsdp2x2"),
                ("qwen3", "tp2-ddp2"),
                ("llama", "tp2-zero3"),
            ]
        ),
    ],
)
def test_muon_orthogonalises_whole_matrices(ranks, muon_reference, family, layout):
    case = Layout(**{**vars(LAYOUTS[layout]), "optim": MUON})
    run(ranks, lambda family, tied, policy: muon_reference(family), family, True, case)


@pytest.mark.parametrize("layout", ["tp2", pytest.param("tp2-zero3", marks=pytest.mark.long)])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_rows_of_several_documents(ranks, reference, family, layout):
    directory, _ = reference(family, True, "fp64")
    batches = cases.packed_batches(LENGTH)
    trace = train_reference(directory, batches, torch.float64, cases.SETTINGS)
    run(ranks, lambda *_: (directory, trace), family, True, Layout(**{**vars(LAYOUTS[layout]), "packed": True}))


# ---- dropout: the reference is our own decoder on one process, which tests/model/test_dropout.py holds against transformers

DROPS = {
    "gpt2": {"n_head": 4, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "qwen3": {"attention_dropout": 0.1},
}


@pytest.fixture(scope="session")
def dropped(tmp_path_factory, ranks):
    @functools.cache
    def make(family):
        directory = cases.write_model(tmp_path_factory.mktemp(f"{family}-drops"), family, True, **DROPS[family])
        one = Layout(1, zero=3, replicate=1, shard=1, length=LENGTH)
        return directory, ranks.run(1, cases.train_layout, str(directory), one)[0]

    return make


def check_dropped(ranks, dropped, family, layout, mutation=contextlib.nullcontext):
    directory, expected = dropped(family)
    case = Layout(**{**vars(LAYOUTS[layout]), "length": LENGTH})
    for result in ranks.run(case.world, cases.train_mutated, mutation, str(directory), case):
        for name in ("losses", "norms", "evaluations"):
            worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(result[name], expected[name], strict=True))
            assert worst <= 1e-10, (name, worst)
        for name in ("gradients", "weights"):
            for parameter, value in expected[name].items():
                assert (result[name][parameter] - value).abs().max() <= 1e-10, (name, parameter)


@pytest.mark.parametrize(
    "layout",
    ["tp2", *(pytest.param(name, marks=pytest.mark.long) for name in ("tp2-zero3", "tp2-zero3-recompute-full"))],
)
@pytest.mark.parametrize("family", DROPS)
def test_tensor_ranks_drop_what_one_process_drops(ranks, dropped, family, layout):
    check_dropped(ranks, dropped, family, layout)


# ---- mutations: each turns a row red


def nothing():
    return contextlib.nullcontext()


def shared_gradients_left_apart():
    """Norms, biases and positions keep what this rank's tokens gave them: the reduction that sequence parallelism needs."""

    def whole(parameter):
        return None if parameter is None else parameter.to_local(grad_placements=[Replicate()])

    return mock.patch.object(tensor, "_shared", whole)


def gathered_gradients_left_apart():
    """Backward of a gather keeps this rank's own part in place of the sum."""

    def gather(x, mesh):
        whole = DTensor.from_local(x, mesh, [Shard(1)], run_check=False).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Replicate()])

    return mock.patch.object(tensor, "gather", gather)


def bias_on_every_rank():
    def forward(self, x):
        bias = None if self.bias is None else self.bias.to_local(grad_placements=[Partial()])
        return tensor.scatter(functional.linear(x, self.weight.to_local(), bias), self.mesh)

    return mock.patch.object(tensor.RowLinear, "forward", forward)


def softmax_over_own_rows():
    return mock.patch.object(tensor, "Cut", lambda group, first_row: Cut(None, first_row))


def targets_in_own_rows():
    """Targets are taken for places among this rank's rows."""
    return mock.patch.object(tensor, "Cut", lambda group, first_row: Cut(group, 0))


def lookup_without_a_mask():
    def forward(self, ids):
        weight = self.weight.to_local()
        return tensor.scatter(functional.embedding(ids % len(weight), weight), self.mesh)

    return mock.patch.object(tensor.VocabularyEmbedding, "forward", forward)


def norm_of_this_rank():
    """Each rank clips by the norm of what it holds."""
    clip = cases.clip_gradients

    def local(records, max_norm, parts):
        mine = [record.tensor.grad.to_local() for record in records]
        factor = (max_norm / (torch.nn.utils.get_total_norm(mine) + 1e-6)).clamp(max=1.0)
        kept = [gradient * factor for gradient in mine]
        norm = clip(records, max_norm, parts)
        for record, gradient in zip(records, kept, strict=True):
            record.tensor.grad.to_local().copy_(gradient)
        return norm

    return mock.patch.object(cases, "clip_gradients", local)


def parts_orthogonalised_alone():
    """Each rank iterates on its own part of a matrix."""

    def alone(self, dealt, is_finite):
        return [muon.newton_schulz(self._update(parameter, is_finite), 5) for parameter in dealt]

    return mock.patch.object(muon.Muon, "_orthogonal", alone)


def replicas_not_summed():
    return mock.patch.object(ddp, "sum_over_replicas", lambda *args: None)


def parts_of_norms_not_summed():
    """What every tensor rank holds whole keeps this rank's part; replicas are summed."""

    def plain(records, mesh, bucket_mib, reduce):
        for record in records:
            local = record.tensor.grad.to_local()
            record.tensor.grad = DTensor.from_local(local, record.tensor.device_mesh, record.tensor.placements)
        ddp.sum_over_replicas(ddp.local_gradients(records), mesh.loss_group, int(bucket_mib * MIB), reduce)

    return mock.patch.object(program, "sum_gradients", plain)


def samples_by_the_global_rank():
    return mock.patch.object(Mesh, "batch_rank", property(lambda self: dist.get_rank() % self.layout.batch_ranks))


def positions_from_zero():
    """Every rank takes its positions and heads for the first ones, in the masks of dropout."""
    return mock.patch.object(Decoder, "_shares", lambda self, num_positions, device: (None, None))


RED = [
    (shared_gradients_left_apart, "qwen3", "tp2"),
    (shared_gradients_left_apart, "gpt2", "tp2-zero3"),
    (gathered_gradients_left_apart, "qwen3", "tp2"),
    (bias_on_every_rank, "gpt2", "tp2"),
    (softmax_over_own_rows, "qwen3", "tp2"),
    (targets_in_own_rows, "qwen3", "tp2"),
    (lookup_without_a_mask, "qwen3", "tp2"),
    (norm_of_this_rank, "qwen3", "tp2-zero3"),
    (samples_by_the_global_rank, "qwen3", "tp2-zero3"),
    (replicas_not_summed, "qwen3", "tp2-ddp2"),
    (parts_of_norms_not_summed, "qwen3", "tp2-ddp2"),
]


@pytest.mark.parametrize(
    ("mutation", "family", "layout"),
    [pytest.param(*one, marks=pytest.mark.long if one[2] == "tp2-zero3" else ()) for one in RED],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_comparison_turns_red(ranks, reference, mutation, family, layout):
    with pytest.raises(AssertionError) as caught:
        run(cases.Mutating(ranks, mutation), reference, family, True, LAYOUTS[layout])
    assert not isinstance(caught.value, RankFailed), "the ranks trained on; it is the comparison that finds it"


def test_the_comparison_of_masks_turns_red(ranks, dropped):
    with pytest.raises(AssertionError) as caught:
        check_dropped(ranks, dropped, "gpt2", "tp2", positions_from_zero)
    assert not isinstance(caught.value, RankFailed)


def test_the_comparison_of_muon_turns_red(ranks, muon_reference):
    case = Layout(**{**vars(LAYOUTS["tp2"]), "optim": MUON})
    mutating = cases.Mutating(ranks, parts_orthogonalised_alone)
    with pytest.raises(AssertionError) as caught:
        run(mutating, lambda family, tied, policy: muon_reference(family), "qwen3", True, case)
    assert not isinstance(caught.value, RankFailed)


def test_without_a_mutation_it_is_green(ranks, reference):
    run(cases.Mutating(ranks, nothing), reference, "qwen3", True, LAYOUTS["tp2"])


def pp(schedule, world=4, shard=1, replicate=1, zero=1, **more):
    return Layout(world, zero, replicate, shard, 1, sharding=(*TP, ("pp", 2), ("schedule", schedule)), **more)


STAGED = {
    "1f1b": pp("1f1b"),
    "gpipe-full": pp("gpipe", recompute="full"),
    "zbv": pp("zbv"),
    "interleaved-1f1b-shard2": pp("interleaved-1f1b", 8, 2),
    "interleaved-zero-bubble": pp("interleaved-zero-bubble"),
    "1f1b-packed": pp("1f1b", packed=True),
    "1f1b-ddp2": pp("1f1b", 8, replicate=2, zero=0),
    "zbv-ddp": pp("zbv", zero=0),
}


@pytest.fixture(scope="session")
def staged_reference(tmp_path_factory):
    """Of five blocks, so that stages are unequal."""

    @functools.cache
    def make(family, tied):
        place = tmp_path_factory.mktemp(f"{family}-{tied}-5")
        layers = {"gpt2": {"n_layer": 5}}.get(family, {"num_hidden_layers": 5})
        directory = cases.write_model(place, family, tied, **FIELDS.get(family, {}), **layers)
        batches = cases.global_batches(LENGTH)
        packed = cases.packed_batches(LENGTH)
        return directory, *(train_reference(directory, one, torch.float64, cases.SETTINGS) for one in (batches, packed))

    return make


STAGED_QUICK = {("qwen3", "1f1b-packed"), ("gpt2", "interleaved-zero-bubble")}
STAGED_CELLS = [
    pytest.param(family, tied, layout, marks=() if (family, layout) in STAGED_QUICK else pytest.mark.long)
    for family, tied in (("qwen3", True), ("gpt2", False))
    for layout in STAGED
]


@pytest.mark.parametrize(("family", "tied", "layout"), STAGED_CELLS)
def test_beside_a_pipeline(ranks, staged_reference, family, tied, layout):
    directory, plain, packed = staged_reference(family, tied)
    case = STAGED[layout]
    run(ranks, lambda *_: (directory, packed if case.packed else plain), family, tied, case)


FOUR_AXES = {
    "pp2 x replicate2 x shard2 x tp2": pp("1f1b", 16, shard=2, replicate=2),
    "pp2 interleaved x shard2 x context2 x tp2": Layout(
        16, 1, 1, 2, 1, sharding=(*TP, ("pp", 2), ("schedule", "interleaved-1f1b"), ("context", 2))
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("layout", FOUR_AXES)
def test_four_axes_on_16_ranks(ranks, staged_reference, layout):
    directory, plain, _ = staged_reference("qwen3", True)
    try:
        run(ranks, lambda *_: (directory, plain), "qwen3", True, FOUR_AXES[layout], timeout_s=900)
    finally:
        ranks.close()  # 16 processes, of which other tests need 8 at most


@pytest.mark.parametrize("layout", ["tp2-zero3", pytest.param("tp2-ddp2", marks=pytest.mark.long)])
@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16-pure"])
def test_16_bits_stay_within_their_tolerance(ranks, reference, policy, layout):
    directory, trace = reference("qwen3", True, "fp32")
    case = Layout(**{**vars(LAYOUTS[layout]), "policy": policy, "length": LENGTH})
    for result in ranks.run(case.world, cases.train_layout, str(directory), case):
        for ours, theirs in zip(result["losses"], trace.losses, strict=True):
            assert abs(ours - theirs) <= 3e-3 * max(1.0, theirs)
        for ours, theirs in zip(result["norms"], trace.norms, strict=True):
            assert abs(ours - theirs) <= 3e-2 * theirs
