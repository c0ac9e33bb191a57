"""Bytes and calls by formula, against the counts of benchmarks/results/layouts.json and by hand."""

import dataclasses
import json
from pathlib import Path

import pytest

from tests.advice.test_facts import FACTS
from windlass.advice.traffic import Sent, traffic

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "layouts.json"
DDP = {"replicate": 4, "shard": 1}
HSDP = {"replicate": 2, "shard": 2}


def sent(zero, **changes):
    return traffic(dataclasses.replace(FACTS, **changes), zero)


def test_ddp_sends_each_gradient_one_and_a_half_times_on_four_ranks_in_buckets():
    assert sent(0, layout=DDP) == Sent(4, 6000.0)
    assert sent(0, layout=DDP, trained_elements=10, buckets=1) == Sent(1, 60.0), "an adapter's alone"


def test_zero_gathers_and_scatters_three_quarters_on_four_ranks():
    assert sent(1) == Sent(5 + 5, 0.75 * (2000 + 4000))
    assert sent(2) == Sent(5 + 10, 0.75 * (2000 + 8000)), "gradients on each of 2 micro-batches"
    assert sent(3) == Sent(18 + 10, 0.75 * (2 * 1800 * 2 + 8000)), "the root is gathered once"


def test_of_what_is_gathered_in_fp8_a_byte_less_is_sent():
    assert sent(1, fp8_elements=600) == Sent(5 + 5, 0.75 * (2000 - 600 + 4000))
    assert sent(3, fp8_elements=600) == Sent(18 + 10, 0.75 * (2 * (2 * (2000 - 600) - 400) + 8000))


def test_hsdp_shares_the_sums_of_its_shards_between_copies():
    assert sent(3, layout=HSDP) == Sent(18 + 10 + 5, 0.5 * (7200 + 8000) + 0.5 * 2 * 4000 / 2)


def test_context_ranks_are_among_those_that_add_up_and_those_that_shard():
    assert sent(0, layout={"replicate": 2, "context": 2}) == sent(0, layout=DDP)
    assert sent(3, layout={"shard": 2, "context": 2}) == sent(3, layout={"shard": 4})


def test_tensor_ranks_divide_and_one_rank_sends_nothing():
    assert sent(0, layout={"replicate": 2, "tp": 2}) == Sent(4, 0.5 * 2 * 2000)
    assert sent(3, layout={}) == Sent(0, 0.0)


SMALL_BYTES = {"DDP": 18, "ZeRO-2": 558, "ZeRO-3": 558, "HSDP": 378}
LAYOUTS = {"DDP": (0, DDP), "ZeRO-2": (2, {"shard": 4}), "ZeRO-3": (3, {"shard": 4}), "HSDP": (3, HSDP)}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_formulas_are_what_real_runs_send(layout, recompute):
    """benchmarks/results/layouts.json: 1,640,832 parameters in fp32 on 4 ranks, 8 blocks, 2 micro-batches."""
    zero, axes = LAYOUTS[layout]
    given = {"layout": axes, "elements": 1640832, "trained_elements": 1640832, "end_elements": 513 * 128, "units": 9,
             "end_units": 1, "gathered_bytes": 4, "buckets": 1}  # fmt: skip
    counted = json.loads(RESULTS.read_text())["rows"][f"{layout}, {recompute}"]["sent"]
    sums = {
        "calls": sum(row["calls"] for row in counted.values()),
        "ring": sum(row["ring"] for row in counted.values()),
    }
    found = sent(zero, **given)
    small = 2 if zero == 0 else 3  # loss, count, and the norm of what is cut
    assert (sums["calls"], round(sums["ring"] - found.bytes)) == (found.calls + small, SMALL_BYTES[layout])
