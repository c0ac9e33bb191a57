"""Weights & Biases: one run with the run's id; and the package itself, offline, where it is installed."""

import importlib
import json
import os
import subprocess
import sys
import types

import pytest

from windlass.errors import UserError
from windlass.report.events import EventLog
from windlass.report.sinks.sink import SentRun

ID = "0123456789abcdef"


@pytest.fixture
def fake(monkeypatch):
    """A package `wandb` that keeps what it is called with; `fake.error`: what `init` raises."""
    made = types.ModuleType("wandb")
    made.calls, made.error = [], None
    made.Settings = lambda **given: given
    made.errors = types.SimpleNamespace(Error=type("Error", (Exception,), {}))

    class Run:
        def define_metric(self, *args, **given):
            made.calls.append(("define", *args, given))

        def log(self, values):
            made.calls.append(("log", values))

        def finish(self):
            made.calls.append(("finish",))

    def init(**given):
        if made.error:
            raise made.error
        made.calls.append(("init", given))
        return Run()

    made.init = init
    monkeypatch.setitem(sys.modules, "wandb", made)
    monkeypatch.delitem(sys.modules, "windlass.report.sinks.to_wandb", raising=False)
    made.sink = importlib.import_module("windlass.report.sinks.to_wandb").WeightsAndBiases
    yield made
    sys.modules.pop("windlass.report.sinks.to_wandb", None)


def test_a_run_keeps_its_id_over_resumes_and_steps_are_the_axis(fake, tmp_path):
    sink = fake.sink(SentRun(tmp_path / "mine", ID, {"run": {"steps": 3}}, "project"))
    sink.numbers(3, 5.0, {"train/loss": 2.5})
    sink.flush()
    sink.close()
    (_, given), *rest = fake.calls
    expected = {"project": "project", "name": "mine", "id": ID, "resume": "allow", "config": {"run": {"steps": 3}}}
    assert {key: given[key] for key in expected} == expected and given["dir"] == str(tmp_path / "mine" / "sinks")
    assert rest == [
        ("define", "step", {}),
        ("define", "*", {"step_metric": "step"}),
        ("log", {"train/loss": 2.5, "step": 3, "time": 5.0}),
        ("finish",),
    ]


def test_an_account_that_is_missing_is_a_clear_line(fake, tmp_path):
    fake.error = fake.errors.Error("no API key")
    with pytest.raises(UserError) as caught:
        fake.sink(SentRun(tmp_path, ID, {}, "p"))
    assert (
        caught.value.given == "wandb does not begin a run: no API key" and "WANDB_MODE=offline" in caught.value.change
    )


def test_the_package_writes_a_run_of_that_id_offline(tmp_path):
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("the extra wandb is not installed: pip install wandb")
    run = tmp_path / "mine"
    log = EventLog(run / "events.jsonl")
    (run / "run.json").write_text(json.dumps({"run_id": ID}))
    for step in (1, 2):
        log.write("step", step, {"loss": 1.0 / step})
    environment = {**os.environ, "WANDB_MODE": "offline", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "windlass", "sync", str(run), "--to", "wandb"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "wandb: 2 lines sent\n"), done.stderr
    (file,) = (run / "sinks" / "wandb").glob(f"offline-run-*-{ID}/run-{ID}.wandb")
    assert b"train/loss" in file.read_bytes()
