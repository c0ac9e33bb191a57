"""The floor model's table for one H200, and its terms answer to what they are made of: loss and update to counted bytes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from floor import LIMIT, PRACTICAL, STATE_BYTES, Work, least_bytes, on, seconds_per_token, tokens_per_s

from windlass.hardware import find_device
from windlass.model.config import ModelConfig
from windlass.units import GIB


def architecture(preset):
    return ModelConfig(preset=preset).architecture()


# preset, T, tokens of a micro-batch; tokens/s by LIMIT, by PRACTICAL, by PRACTICAL with full recomputation, for one H200 and
# 131,072 tokens per step
TABLE = [
    ("qwen2.5-1.5b", 4096, 65536, 62_597, 55_635, 43_610),
    ("qwen2.5-1.5b", 8192, 65536, 55_075, 48_940, 38_484),
    ("smollm3-3b", 4096, 32768, 32_965, 29_435, 22_732),
    ("smollm3-3b", 8192, 32768, 29_347, 26_186, 20_314),
    ("qwen3-4b", 4096, 24576, 23_992, 21_465, 16_660),
    ("qwen3-4b", 8192, 24576, 20_341, 18_177, 14_185),
    ("llama-3.1-8b", 4096, 16384, 14_507, 13_046, 10_048),
    ("llama-3.1-8b", 8192, 16384, 13_231, 11_884, 9_188),
]


@pytest.mark.parametrize(("preset", "length", "micro", "limit", "practical", "full"), TABLE)
def test_the_table_of_the_floor_model(preset, length, micro, limit, practical, full):
    arch, work = architecture(preset), Work(length, 131072, micro)
    assert round(tokens_per_s(arch, work, LIMIT)) == limit
    assert round(tokens_per_s(arch, work, PRACTICAL)) == practical
    assert round(tokens_per_s(arch, replace(work, recompute="full"), PRACTICAL)) == full


def test_each_choice_costs_what_it_says():
    arch, best = architecture("smollm3-3b"), Work(8192, 65536, 32768)
    rows = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "step_bytes.json").read_text())["rows"]
    base = seconds_per_token(arch, best, PRACTICAL)

    def ratio(term, **change):
        return seconds_per_token(arch, replace(best, **change), PRACTICAL)[term] / base[term]

    assert ratio("elementwise", compile=False) == pytest.approx(2.6)
    assert ratio("loss", loss="dense") == pytest.approx(42 / rows["loss compiled, bf16"]["bytes_per_logit"])
    assert ratio("optimizer", kernel="foreach") == pytest.approx(
        72 / rows["update compiled, gradients in fp32"]["bytes_per_parameter"]
    )
    assert ratio("optimizer", tokens_per_step=32768) == pytest.approx(2)
    assert ratio("sums", tokens_per_step=32768) == pytest.approx(12 / 10)
    assert ratio("sums", policy="bf16-pure", states="bf16") == pytest.approx(4 / 10)
    assert ratio("attention", sequence_length=4096) == pytest.approx(0.5)
    assert ratio("total", attention="masked") == pytest.approx(1.66, abs=0.01)
    assert base["total"] == pytest.approx(sum(v for k, v in base.items() if k != "total") * 1.015)


def test_another_device_gets_the_same_share_of_its_own_peak():
    rates = on(find_device("NVIDIA H100 80GB HBM3"), LIMIT)
    assert rates.products == pytest.approx(790e12, rel=1e-3) and rates.bandwidth == pytest.approx(4.3e12 * 3350 / 4800)
    assert on(find_device("NVIDIA A100-SXM4-80GB"), LIMIT).attention_forward == pytest.approx(640e12 * 312 / 989.4)


def test_the_least_memory_knows_that_8b_needs_smaller_states():
    arch, work = architecture("llama-3.1-8b"), Work(4096, 65536, 8192)
    there = 139 * GIB
    assert least_bytes(arch, work) > there  # 16 bytes per parameter do not leave room for two sequences
    assert least_bytes(arch, replace(work, states="bf16")) < there
    small = replace(work, policy="bf16-pure", states="bf16", recompute="full")
    assert least_bytes(arch, small) < 79 * GIB < least_bytes(arch, replace(work, states="bf16", recompute="full"))
    assert STATE_BYTES["bf16", "fp32"] == 16
