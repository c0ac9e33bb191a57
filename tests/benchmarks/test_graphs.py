"""What benchmarks/graphs.py counts: its rows, counted again, and what holds of every one of them."""

import json
import sys
from pathlib import Path

import pytest

from windlass.model.families.family_table import FAMILIES
from windlass.precision.config import POLICIES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KEPT = json.loads((BENCHMARKS / "results" / "graphs.json").read_text())["rows"]
QUICK = ["llama", "gemma3_text"]
"""One kind of block, and two."""


def counted(families, policies):
    """On a rank."""
    sys.path.insert(0, str(BENCHMARKS))
    import graphs

    return graphs.counted(families, policies)


def test_every_family_has_a_row_under_every_policy_that_a_cpu_computes_in():
    policies = [
        policy for policy in POLICIES if policy not in ("fp64", "fp16", "auto")
    ]  # another name, or another device
    names = {
        f"{family}, {policy}, {kind}" for family in FAMILIES for policy in policies for kind in ("plain", "isolated")
    }
    assert set(KEPT) == names


@pytest.mark.parametrize("name", KEPT)
def test_no_graph_breaks_and_nothing_compiles_again_but_once_for_more_documents(name):
    row = KEPT[name]
    assert row["breaks"] == row["again"] == row.get("yet more", 0) == 0
    # half are of the loss, and half are of evaluation
    kinds = (row["graphs"] - 2) // 2
    assert row["graphs"] == 2 + 2 * kinds and kinds in (1, 2) and row.get("more documents", 0) in (0, kinds)


@pytest.mark.parametrize(("families", "policies"), [(QUICK, ["fp32"]), (["llama"], ["bf16", "fp8"])])
def test_rows_of_some_families_counted_again(ranks, families, policies):
    (found,) = ranks.run(1, counted, families, policies)
    assert found == {name: KEPT[name] for name in found} and len(found) == 2 * len(families) * len(policies)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_all_rows_counted_again(ranks, family):
    policies = list(dict.fromkeys(name.split(", ")[1] for name in KEPT))
    (found,) = ranks.run(1, counted, [family], policies, timeout_s=600)
    assert found == {name: row for name, row in KEPT.items() if name.startswith(f"{family}, ")}
