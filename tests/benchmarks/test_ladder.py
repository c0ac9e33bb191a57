"""The ladder: one change per rung, from the usual first try to windlass's settings; a trial of two rungs."""

import json
from dataclasses import asdict

import pytest
from ladder import CHANGES, ORDER, main, make_cells, rungs
from step import Setup

from windlass.optim.config import OptimConfig


def test_each_rung_changes_one_thing():
    names = [name for name, _ in CHANGES]
    settings = [asdict(setups[0]) for setups in rungs(tiny=False).values()]
    for name, before, after in zip(names[1:], settings, settings[1:]):
        changed = {key for key in before if before[key] != after[key]}
        assert changed == ({"sequences_per_step", "micro_batch"} if name == "batch" else set(dict(CHANGES)[name])), name
        assert len(changed) == 1 or name == "batch"


def test_the_last_rung_is_windlass_and_the_first_is_not():
    known = rungs(tiny=False)
    assert known["no recomputation"][0] == Setup("smollm3-3b", 8192, 8, 4)
    assert OptimConfig().kernel == "fused"
    first = known["first try"][0]
    assert (first.compile, first.loss, first.kernel, first.attention) == (False, "dense", "foreach", "masked")
    assert [setup.micro_batch for setup in known["chunked loss"]] == [4, 2, 1]
    assert all(setup.tokens_per_step == 65536 for setup in known["compile"])


def test_the_ends_are_measured_first_and_all_fit_the_time():
    assert ORDER[:2] == ("no recomputation", "first try") and [cell.name for cell in make_cells(False)] == list(ORDER)
    assert sum(cell.estimate_s for cell in make_cells(tiny=False)) < 8 * 60


def test_a_trial_of_two_rungs(tmp_path, capsys):
    out = tmp_path / "trial.json"
    for rung in ("first try", "right attention"):
        assert main(["--device", "cpu", "--tiny", "--out", str(out), "--only", rung]) == 0
    content = json.loads(out.read_text())
    results = {row["name"]: row["result"] for row in content["cells"]}
    assert results.keys() == {"first try", "right attention"}
    assert results["first try"]["setup"]["attention"] == "masked" and results["first try"]["tokens_per_s"] > 0
    before, after = (results[name]["loss"][0] for name in ("first try", "right attention"))
    assert before == pytest.approx(after, abs=2e-3)
    printed = capsys.readouterr().out
    assert "not yet" in printed and "MFU %" in printed
