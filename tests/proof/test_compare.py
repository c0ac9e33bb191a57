"""What counts as a difference, and what is reported of the first."""

import math
from dataclasses import replace

import pytest
import torch

from windlass.model.architecture import parameter_shapes
from windlass.model.config import ModelConfig
from windlass.proof.compare import TOLERANCE, compare_events, figures, numbers, proof_row_as_json, same_rows, tensors
from windlass.proof.reference_run import ReferenceRun
from windlass.proof.watch import Seen

ARCHITECTURE = ModelConfig(
    family="gpt2", n_embd=6, n_layer=2, n_head=2, n_positions=9, vocab_size=11, tie_word_embeddings=False
).architecture()


@pytest.fixture
def expected():
    generator = torch.Generator().manual_seed(2)
    shapes = parameter_shapes(ARCHITECTURE)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def test_equal_numbers_are_equal_and_the_first_that_differs_is_reported():
    assert numbers("loss", [[1.0, 2.0], [1.0, 2.0 + 1e-11]], [1.0, 2.0]).agrees
    row = numbers("loss", [[1.0, 2.0, 3.0], [1.0, 2.1, 3.2]], [1.0, 2.0, 3.0])
    assert not row.agrees and row.where == "step 2 on rank 1: 2.1, one process has 2.0"
    assert row.largest == pytest.approx(0.2 / 3)
    assert not numbers("loss", [[math.nan]], [1.0]).agrees
    assert "step 3 on" in numbers("loss", [[9.0]], [1.0], first_step=3).where


@pytest.mark.parametrize("change", [0.0, 0.9])
def test_a_tensor_may_be_off_by_the_tolerance_of_its_largest_element(expected, change):
    name = "model.layers.1.mlp.up_proj.weight"
    ours = {key: tensor.clone() for key, tensor in expected.items()}
    ours[name].view(-1)[3] += change * TOLERANCE * expected[name].abs().max()
    assert tensors("gradients", [ours], expected, ARCHITECTURE).agrees


def test_the_tensor_nearest_to_the_loss_is_reported_with_place_rank_and_numbers(expected):
    ours = {key: tensor.clone() for key, tensor in expected.items()}
    ours["model.embed_positions.weight"] += 1
    ours["model.layers.0.self_attn.k_proj.weight"][2, 4] += 1e-6
    row = tensors("gradients", [expected, ours], expected, ARCHITECTURE, are_gradients=True)
    value = float(expected["model.layers.0.self_attn.k_proj.weight"][2, 4])
    assert row.where.startswith("transformer.h.0.attn.c_attn.weight (k_proj)[2, 4] on rank 1: ")
    assert f"one process has {value!r}" in row.where and "times too large" not in row.where
    assert row.where.endswith(
        "; it is the nearest to the loss of 2 tensors that differ, from transformer.wpe.weight on"
    )
    assert row.largest >= 0.1 and row.compared == f"{len(expected)} tensors, 2 ranks"


def test_of_weights_the_tensor_furthest_apart_is_named(expected):
    """After an update every tensor differs, also those nearer to the loss than the one whose update is wrong."""
    ours, worse = ({key: tensor + 1e-8 for key, tensor in expected.items()} for _ in range(2))
    name = "model.layers.0.self_attn.k_proj.weight"
    ours[name][2, 4] += 1e-6
    worse[name][1, 3] += 1e-4
    row = tensors("weights after 3 steps", [ours, worse], expected, ARCHITECTURE)
    assert row.where.startswith("transformer.h.0.attn.c_attn.weight (k_proj)[1, 3] on rank 1: ")
    assert row.where.endswith(f"; it is the furthest apart of {len(expected)} tensors that differ")
    worse[name][0, 0] = math.nan
    assert "[0, 0] on rank 1: nan" in tensors("weights", [ours, worse], expected, ARCHITECTURE).where


FORWARD = (
    *("input_layernorm", "self_attn.q_proj", "self_attn.q_norm", "self_attn.k_norm", "self_attn.o_proj"),
    *("post_attention_layernorm", "mlp.gate", "mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj"),
)


@pytest.mark.parametrize("culprit", range(len(FORWARD)), ids=FORWARD)
def test_a_mistake_is_reported_at_the_parameter_whose_gradient_it_spoils_first(culprit):
    """All that comes before it in the forward pass differs too."""
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 11,
    }
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4, "tie_word_embeddings": False}
    architecture = ModelConfig(family="qwen3_moe", head_dim=4, **sizes, **experts).architecture()
    expected = {name: torch.ones(shape, dtype=torch.float64) for name, shape in parameter_shapes(architecture).items()}
    spoilt = ("model.embed_tokens.weight", *(f"model.layers.0.{name}.weight" for name in FORWARD))
    spoilt += tuple(f"model.layers.1.{name}.weight" for name in FORWARD[: culprit + 1])
    ours = {name: tensor + 0.1 if name in spoilt else tensor for name, tensor in expected.items()}
    row = tensors("gradients", [ours], expected, architecture, are_gradients=True)
    named = spoilt[-1].replace("experts.", "experts.*.")
    assert row.where.startswith(f"{named}[") and row.where.endswith("from model.embed_tokens.weight on")


def test_a_tensor_of_nearly_nothing_is_held_against_the_model(expected):
    name = "model.layers.0.input_layernorm.bias"
    expected[name] = torch.full_like(expected[name], 1e-18)
    ours = {**expected, name: torch.zeros_like(expected[name])}
    assert tensors("gradients", [ours], expected, ARCHITECTURE).agrees


def test_a_scale_is_reported_as_one(expected):
    name = "model.layers.0.self_attn.o_proj.weight"
    row = tensors("gradients", [{**expected, name: expected[name] * 3}], expected, ARCHITECTURE)
    assert "(all of it is 3 times too large)" in row.where


def test_a_tensor_that_is_missing_or_not_asked_for_differs(expected):
    name = "lm_head.weight"
    without = {key: tensor for key, tensor in expected.items() if key != name}
    assert tensors("gradients", [expected], without, ARCHITECTURE).where == f"{name}: rank 0 has one, it has none"
    row = tensors("gradients", [without], expected, ARCHITECTURE)
    assert not row.agrees and row.where == f"{name}: no rank has one, one process has it"
    assert proof_row_as_json(row)["largest"] is None


def test_not_a_number_is_a_difference(expected):
    name = "model.norm.bias"
    broken = expected[name].clone()
    broken[1] = math.nan
    row = tensors("weights", [{**expected, name: broken}], expected, ARCHITECTURE)
    assert not row.agrees and row.where.startswith("transformer.ln_f.bias[1] on rank 0: nan")


def figures_of(*busiest):
    return [{"expert_loads": torch.tensor([1.0, load], dtype=torch.float64)} for load in busiest]


def test_figures_of_routers_are_held_against_each_step_and_rank():
    expected = figures_of(1.5, 1.25)
    assert figures([figures_of(1.5, 1.25)] * 2, expected).agrees
    row = figures([figures_of(1.5, 1.25), figures_of(1.5, 1.3)], expected)
    assert row.where == "step 2 on rank 1: expert_loads is [1.0, 1.3], one process has [1.0, 1.25]"
    assert figures([[]], expected).where == "step 1 on rank 0: expert_loads is reported by one and not by the other"


def test_a_run_of_other_length_is_a_difference():
    assert numbers("loss", [[1.0, 2.0], [1.0]], [1.0, 2.0]).where == "rank 1 has 1 number"


SEEN = Seen([], [], [], {}, {}, {}, [], 0)


def rows(*numbers_of_rows):
    return {"input_ids": torch.tensor([[n, n + 1] for n in numbers_of_rows])}


def test_samples_are_read_once_over_the_batch_ranks_in_any_order():
    seen = [
        replace(SEEN, rows=[rows(*part)], batch_rank=place) for place, part in ((0, (3, 1)), (1, (0, 2)), (1, (0, 2)))
    ]
    assert same_rows(seen, [rows(0, 1, 2, 3)]).agrees


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (((0, (0, 1)), (1, (0, 1))), "over the ranks are not the global batch's"),
        (((0, (0, 1)),), "over the ranks are not the global batch's"),
        (((0, (0, 1)), (1, (2, 3)), (1, (2, 4))), "of rank 2 are not those of its model-parallel group"),
    ],
)
def test_samples_read_twice_or_not_at_all_are_reported(parts, said):
    seen = [replace(SEEN, rows=[rows(*part)], batch_rank=place) for place, part in parts]
    row = same_rows(seen, [rows(0, 1, 2, 3)])
    assert not row.agrees and said in row.where and row.where.startswith("step 1: input_ids")


LINES = [
    {"kind": "validation", "loss": 5.0},
    {"kind": "step", "loss": 3.0, "gradient_norm": 0.5, "targets": 20},
    {"kind": "checkpoint", "bytes": 7},
    {"kind": "step", "loss": 2.0, "gradient_norm": 0.25, "targets": 10},
    {"kind": "validation", "loss": 4.0},
]


@pytest.mark.parametrize(("line", "change", "what", "where"), [
    (1, {"targets": 10}, "reported targets", "step 1 on rank 0: 10.0, one process has 20"),
    (3, {"loss": 4.0}, "reported loss", "step 2 on rank 0: 4.0, one process has 2.0"),
    (3, {"loss": None}, "reported loss", "step 2 on rank 0: nan, one process has 2.0"),
    (1, {"gradient_norm": 0.25}, "reported norm", "step 1 on rank 0: 0.25, one process has 0.5"),
    (0, {"loss": 2.5}, "reported validation", "step 0 on rank 0: 2.5, one process has 5.0"),
    (4, {"kind": "other"}, "reported validation", "rank 0 has 1 number"),
])  # fmt: skip
def test_what_is_reported_is_the_average_over_counted_targets(line, change, what, where):
    one_process = ReferenceRun([3.0, 2.0], [0.5, 0.25], {}, {}, {}, [40.0, 32.0], [], {}, [20, 10], 8)
    assert (
        all(row.agrees for row in compare_events(LINES, one_process))
        and len(list(compare_events(LINES, one_process))) == 4
    )
    changed = [one | change if number == line else one for number, one in enumerate(LINES)]
    assert [(row.what, row.where) for row in compare_events(changed, one_process) if not row.agrees] == [(what, where)]
