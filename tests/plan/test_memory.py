"""The count of a rank's bytes: lasting bytes equal those of real tensors, activations those of a block on fake tensors."""

import pytest
import torch

from tests.parallel.test_activations import MODELS
from tests.parallel.tiny import MODEL, batch, make_program
from windlass.adapters.config import AdapterConfig
from windlass.model.config import ModelConfig
from windlass.model.lora.adapter import adapter_of, frozen_base
from windlass.model.transformer import Decoder
from windlass.optim.config import OptimConfig
from windlass.optim.optimizer import make_optimizer
from windlass.optim.rules import NO_RULES
from windlass.parallel.activations import Workload, count_kept
from windlass.parallel.build import store
from windlass.parallel.config import MeshLayout, ParallelConfig
from windlass.plan.memory import RankMemory
from windlass.precision.config import PrecisionConfig
from windlass.precision.masters import has_masters
from windlass.precision.policy import precision_of
from windlass.training.parts.device_memory import local_bytes
from windlass.training.parts.open_program import storage_of

ROOMY = MODEL | {
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}  # NF4 stores blocks of 64
CASES = {
    "fp32": {},
    "bf16": {"precision": {"policy": "bf16"}},
    "bf16, gradients in bf16": {"precision": {"policy": "bf16", "gradients": "bf16"}},
    "bf16, states in bf16": {"precision": {"policy": "bf16", "states": "bf16"}},
    "bf16-pure": {"precision": {"policy": "bf16-pure"}},
    "bf16, zero 0": {"precision": {"policy": "bf16"}, "parallel": {"zero": 0}},
    "fp8": {"precision": {"policy": "fp8"}, "model": ROOMY},
    "fp8 rowwise": {"precision": {"policy": "fp8", "scaling": "rowwise"}, "model": ROOMY},
    "muon": {"optim": "muon"},
    "some frozen": {"frozen": ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight")},
    "lora": {"adapter": {"rank": 4}, "precision": {"policy": "bf16"}},
    "a head of its own": {"model": MODELS["llama"]},
}
OVER_RANKS = {
    f"{policy}, zero {zero}": {
        "precision": {"policy": policy},
        "parallel": {"zero": zero, "replicate": 1 if zero else 2, "shard": 2 if zero else 1},
    }
    for policy in ("fp32", "bf16", "bf16-pure")
    for zero in (0, 1, 2, 3)
} | {
    f"fp8, zero {zero}": {
        "precision": {"policy": "fp8"},
        "model": ROOMY,
        "parallel": {"zero": zero, "replicate": 1 if zero else 2, "shard": 2 if zero else 1},
    }
    for zero in (0, 1, 3)
}


def counted(world, model=MODEL, precision=None, parallel=None, optim="adamw", frozen=(), adapter=None):
    architecture = ModelConfig.model_validate(model).architecture()
    config = ParallelConfig(**{"zero": 3, "replicate": 1, "shard": 1} | (parallel or {}))
    found = None if adapter is None else adapter_of(AdapterConfig(kind="lora", **adapter), architecture)
    return RankMemory(
        architecture, config, PrecisionConfig(**(precision or {})), config.layout(world), optim, frozen, found
    ).lasting_bytes()


def real(world, model=MODEL, precision=None, parallel=None, optim="adamw", frozen=(), adapter=None):
    """On one rank: bytes of real tensors after a backward, by kind."""
    policy = PrecisionConfig(**(precision or {}))
    more = {key: value for key, value in (precision or {}).items() if key != "policy"}
    given = {"zero": 3, "replicate": 1, "shard": 1} | (parallel or {})
    program = make_program(
        world, policy=policy.policy, precision=more, model=model, frozen=frozen, adapter=adapter, **given
    )
    storage = storage_of(Recipe(policy), precision_of(policy), "cpu")
    optimizer = make_optimizer(program.records(), OptimConfig(kind=optim), NO_RULES, torch.float32, storage)
    program.run([batch()], torch.tensor(8))
    records = program.records()
    return (
        sum(local_bytes(record.tensor) for record in records),
        sum(local_bytes(copy) for record in records for copy in record.copies),
        sum(local_bytes(record.tensor.grad) for record in records if record.tensor.grad is not None),
        sum(map(local_bytes, optimizer.state_tensors().values())),
    )


class Recipe:
    """The settings that `storage_of` reads."""

    def __init__(self, precision):
        self.precision, self.optim, self.parallel = precision, OptimConfig(), ParallelConfig()
        self.run = type("Run", (), {"seed": 0})
        self.report = type("Report", (), {"every_steps": 1})


def kinds(lasting):
    return lasting.weights, lasting.copies, lasting.gradients, lasting.states


def real_all(world, cases):
    return {name: real(world, **case) for name, case in cases.items()}


def test_lasting_bytes_are_those_of_the_tensors_of_one_process(ranks):
    (found,) = ranks.run(1, real_all, 1, CASES)
    assert {name: kinds(counted(1, **case)) for name, case in CASES.items()} == found


def test_and_those_of_the_first_of_two_ranks(ranks):
    first, second = ranks.run(2, real_all, 2, OVER_RANKS)
    assert {name: kinds(counted(2, **case)) for name, case in OVER_RANKS.items()} == first
    assert all(sum(second[name]) <= sum(first[name]) for name in first)


ALL, END, UNIT = 110_544, 12_288, (110_544 - 2 * 12_288) / 5
"""Parameters of the untied llama: all of them, embedding or head, and one of 5 blocks (with its share of the final norm)."""
GATHERED = {
    1: lambda c, r: c * ALL + r * ALL,
    2: lambda c, r: c * ALL + r * UNIT,
    3: lambda c, r: c * (2 * UNIT + 2 * END) + r * (UNIT + END),
}
"""zero -> bytes, with c as computed and r as reduced: what is gathered, and whole gradients."""


@pytest.mark.parametrize(("policy", "computed", "reduced"), [("fp32", 4, 4), ("bf16", 2, 4), ("bf16-pure", 2, 4)])
@pytest.mark.parametrize("zero", GATHERED)
def test_what_is_gathered_is_the_model_or_units_of_it_and_whole_gradients(zero, policy, computed, reduced):
    cut = {"zero": zero, "replicate": 1, "shard": 2}
    found = counted(2, model=MODELS["llama"], precision={"policy": policy}, parallel=cut).gathered
    assert found == pytest.approx(GATHERED[zero](computed, reduced), abs=1)


@pytest.mark.parametrize(("zero", "gathered"), [(1, 5), (2, 5), (3, 3)])
def test_weights_that_are_gathered_in_fp8_take_a_byte(zero, gathered):
    """`gathered`: of 5 blocks, the ones that are there at once (zero 3: 2 + prefetch)."""
    cut = {"zero": zero, "replicate": 1, "shard": 2, "prefetch": 1}
    of = {
        words: counted(
            2, model=ROOMY | {"num_hidden_layers": 5}, precision={"policy": "fp8", "scaling": words}, parallel=cut
        )
        for words in ("tensorwise", "rowwise")
    }
    eight = 5 * (4 * 32 * 64 + 2 * 32 * 64 + 64 * 128 + 3 * 64 * 128)
    assert of["tensorwise"].gathered - of["rowwise"].gathered == -eight * gathered // 5
    assert of["tensorwise"].copies - of["rowwise"].copies == eight // 2, "a rank's part of them is kept"


@pytest.mark.parametrize(
    ("precision", "sent"),
    [
        ({"policy": "fp32"}, 0),
        ({"policy": "bf16"}, 0),
        ({"policy": "bf16", "reduce": "bf16"}, 2),
        ({"policy": "bf16-pure"}, 4),
    ],
)
def test_gradients_that_zero_0_sends_in_another_dtype_are_a_copy(precision, sent):
    found = counted(2, model=MODELS["llama"], precision=precision, parallel={"zero": 0, "replicate": 2, "shard": 1})
    assert found.gathered == sent * ALL
    assert counted(1, model=MODELS["llama"], precision=precision, parallel={"zero": 0}).gathered == 0


def test_a_base_in_four_bits_is_counted_as_it_is_stored():
    case = {"adapter": {"rank": 4, "base": "nf4"}, "precision": {"policy": "bf16"}, "model": ROOMY}
    architecture = ModelConfig.model_validate(ROOMY).architecture()
    adapter = adapter_of(AdapterConfig(kind="lora", rank=4, base="nf4"), architecture)
    with torch.device("meta"):
        model = Decoder(architecture, adapter=adapter)
    store(model, precision_of(PrecisionConfig(policy="bf16")), frozen_base(architecture, adapter))
    assert counted(1, **case).weights == sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_what_blocks_keep_is_what_a_block_on_fake_tensors_keeps(name, policy):
    architecture = ModelConfig.model_validate(MODELS[name]).architecture()
    errors = compared(architecture, policy, 2, 24)
    limit = (
        0.15 if name in ("mistral", "qwen2") else 0.01
    )  # a CPU attends within a window in pieces, which it keeps too
    assert max(map(abs, errors.values())) < limit, errors


def compared(architecture, policy, rows, length):
    """kind -> the count's relative error in what all blocks keep."""
    precision, config = PrecisionConfig(policy=policy), ParallelConfig()
    memory = RankMemory(architecture, config, precision, config.layout(1), on_gpu=False)
    kept = count_kept(Workload(architecture, config, precision_of(precision), "cpu", (rows, length)))
    errors = {}
    for kind in ("none", "selective", "full"):
        own = rows * length * sum(memory.block_bytes(kind, index) for index in range(architecture.num_layers))
        errors[kind] = own / sum(getattr(block, kind) for block in kept) - 1
    return errors


def test_a_mixture_keeps_the_rows_of_its_experts():
    architecture = ModelConfig.model_validate({"preset": "qwen3-30b-a3b"}).architecture()
    errors = compared(architecture, "bf16", 1, 256)
    assert max(map(abs, errors.values())) < 0.01, errors


@pytest.mark.parametrize(("compiled", "none", "selective"), [(True, 139_000, 94_000), (False, 168_000, 102_000)])
def test_llama_8b_in_published_kilobytes_per_token_and_layer(compiled, none, selective):
    """Compiled as counted from Inductor's partitioner: 139 kB, and 94 kB with selective."""
    architecture = ModelConfig.model_validate({"preset": "llama-3.1-8b"}).architecture()
    memory = RankMemory(
        architecture,
        ParallelConfig(),
        PrecisionConfig(policy="bf16"),
        MeshLayout(1, 1, 1, 1, 1, 1),
        is_compiled=compiled,
    )
    assert abs(memory.block_bytes("none", 0) - none) < 500 and abs(memory.block_bytes("selective", 0) - selective) < 600


@pytest.mark.parametrize("policy", ["fp64", "fp32", "bf16", "fp16", "bf16-pure"])
@pytest.mark.parametrize(("world", "zero"), [(1, 3), (1, 0), (2, 3), (2, 0)])
def test_masters_are_counted_where_they_are(policy, world, zero):
    config, precision = ParallelConfig(zero=zero), PrecisionConfig(policy=policy)
    memory = RankMemory(None, config, precision, config.layout(world))
    assert memory.has_masters == has_masters(world, precision_of(precision), zero, False)


def test_layouts_that_are_not_counted_are_said_so():
    precision = PrecisionConfig(policy="fp32")
    for given in ({"pp": 2}, {"tp": 2}, {"context": 2}, {"expert": 2}, {"offload": True}):
        config = ParallelConfig(**given)
        assert not RankMemory(None, config, precision, config.layout(4)).is_counted
    assert RankMemory(None, ParallelConfig(), precision, ParallelConfig().layout(4)).is_counted


def test_a_longer_or_larger_micro_batch_costs_in_proportion_and_full_less_than_selective():
    architecture = ModelConfig.model_validate({"preset": "smollm3-3b"}).architecture()
    config, precision = ParallelConfig(), PrecisionConfig(policy="bf16")
    memory = RankMemory(architecture, config, precision, config.layout(1))
    one, two = memory.step_bytes(1, 4096, "none"), memory.step_bytes(2, 4096, "none")
    assert two.blocks == 2 * one.blocks == memory.step_bytes(1, 8192, "none").blocks
    totals = [memory.step_bytes(2, 4096, kind).total for kind in ("none", "selective", "full")]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 3
