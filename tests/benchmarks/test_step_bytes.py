"""What benchmarks/step_bytes.py counts, counted again, and its limits."""

import json
import sys
from pathlib import Path

import pytest
import torch

from windlass.precision.config import PrecisionConfig
from windlass.precision.policy import precision_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def counted(names):
    """On every rank of a world that fits the rows."""
    sys.path.insert(0, str(BENCHMARKS))
    import step_bytes

    known = step_bytes.ROWS | step_bytes.SHARDED | step_bytes.REPLICATED | step_bytes.BESIDE
    return step_bytes.counted({name: known[name] for name in names})


def test_one_more_micro_batch_moves_12_bytes_per_parameter_8_in_bf16_and_casts_no_weight(ranks):
    kept = json.loads((BENCHMARKS / "results" / "step_bytes.json").read_text())["rows"]
    (found,) = ranks.run(1, counted, ["masters", "masters-bf16", "fsdp"])
    for name, most in (("masters", 12.0), ("masters-bf16", 8.0)):
        assert found[name]["bytes_per_parameter_and_micro_batch"] <= most
        assert found[name]["casts_of_weights_per_micro_batch"] == 0
    assert (
        found["fsdp"]["bytes_per_parameter_and_micro_batch"] > 40 and found["fsdp"]["casts_of_weights_per_micro_batch"]
    )
    assert found == {name: kept[name] for name in found}, "python benchmarks/step_bytes.py"


def test_fsdp_over_two_ranks_divides_nothing_and_casts_a_shard_once_for_each_gather(ranks):
    kept = json.loads((BENCHMARKS / "results" / "step_bytes.json").read_text())["rows"]
    found, other = ranks.run(2, counted, ["fsdp2 3", "fsdp2 2", "fsdp2 1"])
    assert found == other == {name: kept[name] for name in found}, "python benchmarks/step_bytes.py"
    # four units: two blocks, the embedding, and the head, of which backward gathers the blocks again
    for zero, gathers in {3: 4 + 2, 2: 0, 1: 0}.items():
        one = found[f"fsdp2 {zero}"]
        assert one["casts_of_weights_per_micro_batch"] == gathers
        assert "div" not in one["by_operator"] and "div_" not in one["by_operator"]


def test_replicas_move_12_bytes_too_and_send_once_per_step(ranks):
    kept = json.loads((BENCHMARKS / "results" / "step_bytes.json").read_text())["rows"]
    found, other = ranks.run(2, counted, ["ddp"])
    assert found == other == {"ddp": kept["ddp"]}, "python benchmarks/step_bytes.py"
    assert found["ddp"]["bytes_per_parameter_and_micro_batch"] <= 12.0
    assert found["ddp"]["casts_of_weights_per_micro_batch"] == 0


def test_beside_tensor_ranks_and_stages_12_bytes_too_and_fsdp_over_one_rank_divides_nothing(ranks):
    kept = json.loads((BENCHMARKS / "results" / "step_bytes.json").read_text())["rows"]
    found, other = ranks.run(2, counted, ["tp 2", "pp 2", "fsdp tp 2"])
    assert found == {name: kept[name] for name in found}, "python benchmarks/step_bytes.py"
    for name in ("tp 2", "pp 2"):
        for one in (found[name], other[name]):
            assert one["bytes_per_parameter_and_micro_batch"] <= 12.0
            assert one["casts_of_weights_per_micro_batch"] == 0
    through_fsdp = found["fsdp tp 2"]
    assert other["fsdp tp 2"] == through_fsdp and through_fsdp["casts_of_weights_per_micro_batch"]
    assert "div" not in through_fsdp["by_operator"] and "div_" not in through_fsdp["by_operator"]


@pytest.mark.filterwarnings("ignore")  # the compiler's own, on caches and torch.jit
def test_the_loss_moves_10_bytes_per_logit_compiled(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import step_bytes

    kept = json.loads((BENCHMARKS / "results" / "step_bytes.json").read_text())["rows"]
    assert step_bytes.loss_bytes(torch.bfloat16, False) == kept["loss by operators, bf16"]["bytes_per_logit"]
    assert step_bytes.loss_bytes(torch.bfloat16, True) == kept["loss compiled, bf16"]["bytes_per_logit"] <= 12


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_cast_to_fp8_reads_weights_twice(monkeypatch):
    """For the largest number, then to write a byte, which Inductor counts as read too."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import step_bytes

    kept = json.loads((BENCHMARKS / "results" / "step_bytes.json").read_text())["rows"]
    assert step_bytes.cast_bytes(is_compiled=False) == kept["cast to fp8 by operators"]["bytes_per_weight"]
    assert step_bytes.cast_bytes(is_compiled=True) == kept["cast to fp8 compiled"]["bytes_per_weight"] == 4 + 4 + 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # norm and update read gradients; weights and moments are read and written; so is a copy, as Inductor counts
        ("gradients in fp32", 4 + 4 + 2 * 4 + 2 * 8 + 2 + 2),
        ("gradients in bf16", 2 + 2 + 2 * 4 + 2 * 8 + 2 + 2),
        ("states in bf16", 4 + 4 + 2 * 4 + 2 * 4 + 2 + 2),
        ("bf16-pure", 2 + 2 + 2 * 2 + 2 * 4),
    ],
)
def test_a_compiled_update_moves_each_tensor_once(monkeypatch, name, expected):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import step_bytes

    kept = json.loads((BENCHMARKS / "results" / "step_bytes.json").read_text())["rows"]
    assert set(step_bytes.UPDATES) == {
        row.removeprefix("update compiled, ") for row in kept if row.startswith("update")
    }
    found = step_bytes.update_bytes(precision_of(PrecisionConfig.model_validate(step_bytes.UPDATES[name])))
    assert found == kept[f"update compiled, {name}"]["bytes_per_parameter"] == expected
