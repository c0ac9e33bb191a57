"""A pipeline trains what one process trains: losses, norms, every gradient of the first step, weights after the last.
Five blocks, so that stages are unequal; the model's names survive the cut."""

import contextlib
import functools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.distributed.pipelining.schedules import _PipelineSchedule

from tests import cases
from tests.cases import Layout
from tests.proof.test_same_loss import DTYPE, TOLERANCE, assert_losses, assert_same
from tests.proof.test_same_loss_dropout import FIELDS
from windlass.model.config import ModelConfig
from windlass.model.names import VOCABULARY, stored_as
from windlass.model.open_config import architecture_of
from windlass.optim.config import OptimConfig
from windlass.parallel import ddp, pipeline, tie
from windlass.parallel.schedules import KINDS
from windlass.proof.pool import RankFailed
from windlass.proof.reference import Group, train_reference

BLOCKS = 5


def pp(schedule, world=2, replicate=1, shard=1, zero=1, micro_batch=1, size=2, **more):
    sharding = (("pp", size), ("schedule", schedule))
    return Layout(world, zero, replicate, shard, micro_batch, sharding=sharding, **more)


LAYOUTS = {
    **{schedule: pp(schedule) for schedule in KINDS},
    **{f"{schedule} x shard2": pp(schedule, 4, shard=2) for schedule in KINDS},
    **{f"{schedule} x ddp2": pp(schedule, 4, replicate=2, zero=0) for schedule in KINDS},
    "1f1b, as many micro-batches as ranks": pp("1f1b", micro_batch=4),
    "gpipe, one micro-batch": pp("gpipe", micro_batch=8),
    "1f1b of 4": pp("1f1b", 4, size=4),
    "gpipe of 3": pp("gpipe", 3, size=3),
    "1f1b x hsdp2x2": pp("1f1b", 8, replicate=2, shard=2),
    "zbv x hsdp2x2": pp("zbv", 8, replicate=2, shard=2),
    "1f1b, full": pp("1f1b", recompute="full"),
    "interleaved-1f1b, selective": pp("interleaved-1f1b", 4, shard=2, recompute="selective"),
    "interleaved-zero-bubble, full": pp("interleaved-zero-bubble", recompute="full"),
    "zbv, full": pp("zbv", 4, shard=2, recompute="full"),
    "1f1b, packed": pp("1f1b", packed=True),
    "zbv, packed": pp("zbv", 4, shard=2, packed=True),
}
QUICK = {
    ("qwen3", True): [
        *KINDS,
        *("1f1b x shard2", "zbv x shard2", "gpipe x ddp2", "interleaved-zero-bubble x ddp2"),
        *("1f1b, as many micro-batches as ranks", "gpipe of 3", "1f1b, full", "zbv, packed"),
    ],
    ("qwen3", False): ["1f1b x shard2", "zbv"],
    ("gpt2", True): ["gpipe", "interleaved-1f1b", "zbv x shard2"],
    ("llama", False): ["1f1b"],
}
MODELS = [("qwen3", True), ("qwen3", False), ("llama", False), ("llama", True), ("gpt2", True), ("gpt2", False)]
CELLS = [
    pytest.param(*model, name, marks=() if name in QUICK.get(model, ()) else pytest.mark.long)
    for model in MODELS
    for name in LAYOUTS
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    @functools.cache
    def model(family, tied):
        blocks = {"n_layer" if family == "gpt2" else "num_hidden_layers": BLOCKS}
        return cases.write_model(tmp_path_factory.mktemp(f"pipeline-{family}-{tied}"), family, tied, **blocks)

    @functools.cache
    def make(family, tied, policy, packed):
        batches = cases.packed_batches() if packed else cases.global_batches()
        directory = model(family, tied)
        return directory, train_reference(directory, batches, DTYPE[policy], cases.SETTINGS)

    return make


def train(mutation, directory, case):
    """train_layout's result with the gradients of the first step, before the clip."""
    gradients = {}
    with globals()[mutation]():
        clip = cases.clip_gradients

        def keep(records, *rest):
            if not gradients:
                gradients.update({record.name: cases.full(record.tensor.grad).clone() for record in records})
            return clip(records, *rest)

        with mock.patch.object(cases, "clip_gradients", keep):
            return {**cases.train_layout(directory, case), "gradients": gradients}


def theirs(tensors, name, architecture):
    """Parameter `name` out of transformers' tensors."""
    where = stored_as(name, architecture)
    tensor = tensors[where.name].T if where.transposed else tensors[where.name]
    return tensor.chunk(where.parts)[where.part]


def assert_same_tensors(results, trace, directory, tolerance):
    """Every parameter of the model lies on one pipeline rank, by its own name, and is what it should be."""
    architecture = architecture_of(ModelConfig.model_validate({"from": str(directory)}))
    for kind in ("gradients", "weights"):
        found = {name: tensor for result in results for name, tensor in result[kind].items()}
        expected = {name: theirs(getattr(trace, kind), name, architecture) for name in found}
        assert sum(e.numel() for e in expected.values()) == sum(t.numel() for t in getattr(trace, kind).values())
        most = max(tensor.abs().max() for tensor in expected.values())
        for name, tensor in expected.items():
            ours = found[name][: architecture.vocab_size] if name in VOCABULARY else found[name]
            allowed = tolerance * max(tensor.abs().max(), 1e-3 * most)
            assert (ours - tensor).abs().max() <= allowed, (kind, name)


def run(ranks, reference, family, tied, case, mutation="nothing"):
    directory, trace = reference(family, tied, case.policy, case.packed)
    results = ranks.run(case.world, train, mutation, str(directory), case)
    tolerance = TOLERANCE[case.policy]
    assert_losses(results, trace, tolerance)
    assert all(result["evaluations"] == results[0]["evaluations"] for result in results)
    if case.policy == "fp64":  # AdamW divides by the square root of nearly nothing: fp32 weights differ by the rate
        assert_same_tensors(results, trace, directory, 10 * tolerance)
    return results


def nothing():
    return contextlib.nullcontext()


@pytest.mark.parametrize(("family", "tied", "layout"), CELLS)
def test_fp64(ranks, reference, family, tied, layout):
    run(ranks, reference, family, tied, LAYOUTS[layout])


@pytest.mark.parametrize(
    "layout", ["gpipe", "1f1b x shard2", "interleaved-1f1b", "interleaved-zero-bubble x ddp2", "zbv"]
)
def test_fp32(ranks, reference, layout):
    run(ranks, reference, "qwen3", True, replace(LAYOUTS[layout], policy="fp32"))


@pytest.mark.parametrize(
    ("layout", "parameters"),
    [
        ("1f1b x shard2", None),
        pytest.param("1f1b", "fp32", marks=pytest.mark.long),
        pytest.param("interleaved-1f1b x shard2", None, marks=pytest.mark.long),
        pytest.param("zbv x ddp2", None, marks=pytest.mark.long),
        pytest.param("1f1b x hsdp2x2", None, marks=pytest.mark.long),
    ],
)
def test_pure_bf16_stays_within_its_tolerance(ranks, reference, layout, parameters):
    directory, trace = reference("qwen3", True, "fp32", False)
    precision = () if parameters is None else (("parameters", parameters),)
    case = replace(LAYOUTS[layout], policy="bf16-pure", precision=precision)
    for result in ranks.run(case.world, cases.train_layout, str(directory), case):
        assert all(abs(a - b) <= 3e-3 * max(1.0, b) for a, b in zip(result["losses"], trace.losses, strict=True))
        assert all(abs(a - b) <= 3e-2 * b for a, b in zip(result["norms"], trace.norms, strict=True))
        assert result["dtypes"]["weights"] == {"torch.bfloat16"} == result["dtypes"]["moments"]


def test_evaluation_is_that_of_one_process(ranks, reference):
    directory, _ = reference("qwen3", True, "fp64", False)
    one = ranks.run(1, cases.train_layout, str(directory), Layout(1, 3, 1, 1))[0]["evaluations"]
    for layout in ("1f1b", "interleaved-1f1b x shard2", "zbv"):
        case = LAYOUTS[layout]
        assert run(ranks, reference, "qwen3", True, case)[0]["evaluations"] == pytest.approx(one, rel=1e-12)


@pytest.mark.parametrize("layout", ["1f1b", "gpipe x shard2", "interleaved-1f1b", "zbv x ddp2"])
@pytest.mark.parametrize("family", FIELDS)
def test_dropout_has_the_masks_of_one_process(ranks, tmp_path_factory, family, layout):
    """Keys travel with the micro-batches to every stage; a mask follows from the block's own number."""
    blocks = {"n_layer" if family == "gpt2" else "num_hidden_layers": BLOCKS}
    directory = cases.write_model(
        tmp_path_factory.mktemp(f"dropped-{family}"), family, True, **blocks, **FIELDS[family]
    )
    one = ranks.run(1, cases.train_layout, str(directory), Layout(1, 3, 1, 1, micro_batch=8))[0]
    case = LAYOUTS[layout]
    for result in ranks.run(case.world, cases.train_layout, str(directory), case):
        for name in ("losses", "norms", "evaluations"):
            assert result[name] == pytest.approx(one[name], rel=1e-10), name


@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize("layout", ["1f1b x shard2", "interleaved-1f1b", "zbv x ddp2"])
def test_muon_and_rates_by_name_follow_the_parameters_to_their_stages(ranks, reference, layout, muon):
    directory, _ = reference("qwen3", True, "fp64", False)
    groups = [
        Group(["lm_head.weight"], learning_rate_scale=0.1, weight_decay=0.0),  # the tied pair, by its other name
        Group(["model.layers.3.*"], learning_rate_scale=3.0),
    ]
    settings = replace(cases.SETTINGS, groups=[Group(["model.embed_tokens.weight"], 0.1, 0.0), groups[1]], muon=muon)
    trace = train_reference(directory, cases.global_batches(), torch.float64, settings)
    given = [
        {key: value for key, value in vars(group).items() if key != "frozen" and value is not None} for group in groups
    ]
    chosen = cases.OPTIM.model_dump() | {"groups": given, "kind": "muon" if muon else "adamw"}
    case = replace(LAYOUTS[layout], optim=OptimConfig.model_validate(chosen))
    results = ranks.run(case.world, train, "nothing", str(directory), case)
    for result in results:
        assert_same(result, trace, TOLERANCE["fp64"])
    assert_same_tensors(results, trace, directory, 10 * TOLERANCE["fp64"])


FROZEN = {
    "first stage": ["model.embed_tokens.weight", "model.layers.[012].*"],  # of 1f1b over two ranks: it trains nothing
    "middle": ["model.layers.2.*", "model.layers.*.self_attn.q_proj.weight"],
    "last stage": ["model.layers.[34].*", "model.norm.weight", "lm_head.weight"],
}


def check_frozen(ranks, reference, what, tied, case, mutation="nothing"):
    """The tied pair is frozen by either of its names."""
    directory, _ = reference("qwen3", tied, "fp64", False)
    settings = replace(
        cases.SETTINGS,
        groups=[Group(FROZEN[what] + ["model.embed_tokens.weight"] * (tied and what != "middle"), frozen=True)],
    )
    trace = train_reference(directory, cases.global_batches(), torch.float64, settings)
    chosen = cases.OPTIM.model_dump() | {"groups": [{"names": FROZEN[what], "frozen": True}]}
    case = replace(case, optim=OptimConfig.model_validate(chosen))
    results = ranks.run(case.world, train_frozen, mutation, str(directory), case)
    for result in results:
        assert_same(result, trace, TOLERANCE["fp64"])
    held = {kind: {n: t for result in results for n, t in result[kind].items()} for kind in ("gradients", "weights")}
    cases.assert_same_tensors(held["weights"], trace.weights, directory, 10 * TOLERANCE["fp64"])
    assert held["gradients"].keys() == {n for n in held["weights"] if n in trace.gradients}


def train_frozen(mutation, directory, case):
    with globals()[mutation]():
        return cases.train_layout(directory, case)


FROZEN_LAYOUTS = [
    "1f1b",
    "gpipe x ddp2",
    "interleaved-1f1b x shard2",
    "interleaved-zero-bubble",
    "zbv x shard2",
    "zbv x ddp2",
]
FROZEN_QUICK = {("first stage", True, "1f1b"), ("middle", True, "zbv x shard2"), ("last stage", False, "gpipe x ddp2")}


@pytest.mark.parametrize(
    ("what", "tied", "layout"),
    [
        pytest.param(what, tied, layout, marks=() if (what, tied, layout) in FROZEN_QUICK else pytest.mark.long)
        for what in FROZEN
        for tied in (True, False)
        for layout in FROZEN_LAYOUTS
    ],
)
def test_frozen_parts_are_those_of_one_process(ranks, reference, what, tied, layout):
    check_frozen(ranks, reference, what, tied, LAYOUTS[layout])


# ---- mutations: each turns its row red


def scaled_by_micro_batches():
    """torch's default: gradients are divided by the number of micro-batches."""
    build = _PipelineSchedule.__init__
    return mock.patch.object(
        _PipelineSchedule,
        "__init__",
        lambda self, *args, **kwargs: build(self, *args, **{**kwargs, "scale_grads": True}),
    )


def ends_not_summed():
    """The head's gradient never reaches the embedding."""

    def drop(self):
        if self.head is not None:
            self.head.grad = None

    return mock.patch.object(tie.Tie, "collect", drop)


def mirror_not_renewed():
    """The head keeps its first weights."""
    return mock.patch.object(tie.Tie, "spread", lambda self: None)


def counted_twice():
    """The mirror keeps its gradient, and the norm counts it beside the embedding's."""
    clip = cases.clip_gradients
    ends = []

    def collect(self, original=tie.Tie.collect):
        kept = None if self.head is None else self.head.grad.clone()
        original(self)
        if self.head is not None:
            self.head.grad = kept
            ends[:] = [pipeline.Record("lm_head.weight", self.head, self.head.shape)]

    both = contextlib.ExitStack()
    both.enter_context(mock.patch.object(tie.Tie, "collect", collect))
    # the outer patch of `train` calls this one
    both.enter_context(
        mock.patch.object(cases, "clip_gradients", lambda records, *rest: clip([*records, *ends], *rest))
    )
    return both


def norm_of_the_stage():
    """Each stage clips by the norm of what it holds, and reports the true one."""
    clip = cases.clip_gradients

    def local(records, most, parts):
        mine = [record.tensor.grad.clone() for record in records]
        norm = clip(records, most, parts)
        factor = (most / (torch.nn.utils.get_total_norm(mine) + 1e-6)).clamp(max=1.0)
        for record, gradient in zip(records, mine, strict=True):
            record.tensor.grad.copy_(gradient * factor)
        return norm

    return mock.patch.object(cases, "clip_gradients", local)


def replicas_not_summed():
    return mock.patch.object(ddp, "sum_over_replicas", lambda *args: None)


RED = [
    (scaled_by_micro_batches, "gpipe"),
    (scaled_by_micro_batches, "zbv"),
    (ends_not_summed, "1f1b"),
    (ends_not_summed, "zbv"),
    (mirror_not_renewed, "1f1b x shard2"),
    (mirror_not_renewed, "zbv"),
    (counted_twice, "1f1b"),
    (norm_of_the_stage, "1f1b"),
    (replicas_not_summed, "zbv x ddp2"),
]


@pytest.mark.parametrize(
    ("mutation", "layout", "policy"),
    # AdamW's step does not change with the scale of all gradients of a tensor: a wrong clip shows in fp64's digits only
    [
        pytest.param(*cell, policy, marks=() if policy == "fp64" else pytest.mark.long)
        for cell in RED
        for policy in DTYPE
        if (cell[0], policy) != (norm_of_the_stage, "fp32")
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_comparison_turns_red(ranks, reference, mutation, layout, policy):
    with pytest.raises(AssertionError) as caught:
        run(ranks, reference, "qwen3", True, replace(LAYOUTS[layout], policy=policy), mutation.__name__)
    assert not isinstance(caught.value, RankFailed), "the ranks trained on; it is the comparison that finds it"
