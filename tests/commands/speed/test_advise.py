"""`windlass advise RUN`: what it prints of a run, as lines and as JSON, and with which exit code it refuses."""

import json
import sys

import pytest

from tests.advice import planted
from tests.advice.test_facts import FACTS
from tests.advice.test_observed import SETTINGS, start, step, written
from windlass.cli import main as cli
from windlass.commands.speed.advise import HEALTHY, advise

H200 = {**FACTS.to_event(), "device": "NVIDIA H200", "peak_flops": 989.4e12, "flops_per_token": 22.07e9, "elements": 3e9,
        "trained_elements": 3e9}  # fmt: skip
GOOD = {
    **SETTINGS,
    "run": {"micro_batch": 1, "tokens_per_step": 131072},
    "data": {"sequence_length": 8192},
    "parallel": {"zero": 1, "bucket_mib": 25.0, "compile": True},
}


def on_h200(tmp_path, settings=GOOD, **facts):
    events = start(facts={**H200, **facts}), step(1, 9.0, True), step(10, 1.6, log_s=1e-4, memory_bytes=100 << 30)
    return written(tmp_path, *events, settings=settings)


def test_a_real_healthy_run_is_called_so(tmp_path):
    planted.train(tmp_path, "healthy")
    planted.set_times(tmp_path / "healthy", data_wait_s=0.0, log_s=0.0, step_s=0.02)
    lines = list(advise(tmp_path / "healthy"))
    assert lines[0].startswith("1 x CPU: ") and lines[0].endswith("the mean of 13 steps up to step 14")
    assert [line.split("  ")[1].strip() or line.split("  ")[2] for line in lines[1:5]] == [
        "step", "computing and communication", "waiting for data", "writing lines",
    ]  # fmt: skip
    assert any(line.startswith(HEALTHY) for line in lines) and not any(line.startswith("next") for line in lines)
    assert any(
        line.startswith("MFU: n/a, no peak is known for CPU at this precision. On one H100 SXM") for line in lines
    )
    assert [line.split()[1] for line in lines if line.startswith("  at ")] == ["20%", "30%", "40%", "50%"]


def test_the_mfu_is_explained_on_the_runs_own_device(tmp_path):
    lines = list(advise(on_h200(tmp_path)))
    assert "MFU: 45.7%. On one H200 this model does" in lines
    assert lines[-1].startswith("  at 50%  22.4 k tok/s       12.4 h for 1 G tokens  what the best published runs")


def test_work_done_twice_is_in_the_hfu_and_a_lever_is_shown_with_its_gain(tmp_path):
    lines = list(advise(on_h200(tmp_path, recomputed_flops=22.07e9 / 4, filled=0.5)))
    assert "MFU: 45.7% (HFU 57.1%, with what is computed twice). On one H200 this model does" in lines
    at = lines.index("next: rows of unequal length, +100.0% tok/s (measured)")
    assert "50% of the positions" in lines[at + 1] and lines[at + 2].startswith("      change: ")


def test_an_mfu_that_no_step_reaches_is_called_wrong(tmp_path):
    lines = list(advise(on_h200(tmp_path, flops_per_token=40e9)))
    assert any("above the limit of bf16, so something is counted wrongly" in line for line in lines)
    in_fp8 = {**GOOD, "precision": {"policy": "fp8"}}
    assert not any("counted wrongly" in line for line in advise(on_h200(tmp_path, in_fp8, flops_per_token=40e9)))
    assert any("counted wrongly" in line for line in advise(on_h200(tmp_path, in_fp8, flops_per_token=80e9)))


def test_json_holds_the_same(tmp_path):
    found = json.loads("".join(advise(on_h200(tmp_path, filled=0.5), in_json=True)))
    assert found["mfu"] == pytest.approx(0.4569, abs=1e-4) and found["steps"] == 9
    assert [lever["name"] for lever in found["levers"]] == ["rows of unequal length"]
    assert sum(found["where_s"].values()) == pytest.approx(found["step_s"])
    assert found["levels"]["device"] == "H200" and [row["mfu"] for row in found["levels"]["rows"]] == [
        0.2,
        0.3,
        0.4,
        0.5,
    ]


@pytest.mark.parametrize(("more", "code"), [([], None), (["--json"], None), (["--jsn"], 2)])
def test_the_command(tmp_path, monkeypatch, capsys, more, code):
    monkeypatch.setattr(sys, "argv", ["windlass", "advise", str(on_h200(tmp_path)), *more])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert (caught.value.code or None) == code
    assert ("H200" in capsys.readouterr().out) == (code is None)


def test_a_directory_that_is_no_run_is_a_users_mistake(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["windlass", "advise", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2 and "events.jsonl does not exist" in capsys.readouterr().err
