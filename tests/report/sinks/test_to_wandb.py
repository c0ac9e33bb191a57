"""Weights & Biases: one run with the run's id; and the package itself, offline, where it is installed."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import types

import pytest

from tests import tiny
from tests.report.sinks.wandb_server import Wandb
from windlass.errors import UserError
from windlass.report.events import EventLog
from windlass.report.sinks.sink import SentRun
from windlass.training.loop import train

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


@pytest.mark.long
def test_wandb_itself_reads_a_run_and_its_resume_back_as_one_run(tmp_path, monkeypatch):
    """The run does steps 4 to 6 twice, since its last checkpoint is lost. What `wandb sync` reads in the two offline files has
    the run's one id, every step once, and the values of events.jsonl."""
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("the extra wandb is not installed: pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    for steps in (6, 8):
        config = tiny.recipe(
            tmp_path, run={"steps": steps}, report={"every_steps": 1, "sinks": ["wandb"], "project": "project"}
        )
        train(config)
        shutil.rmtree(config.run.directory / "checkpoints" / "step-00000006", ignore_errors=True)
    run_id = json.loads((config.run.directory / "run.json").read_text())["run_id"]
    folders = sorted((config.run.directory / "sinks" / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    with Wandb() as server:
        account = {"WANDB_MODE": "online", "WANDB_BASE_URL": server.address, "WANDB_API_KEY": "0" * 40}
        command = [sys.executable, "-m", "wandb", "sync", *map(str, folders)]
        environment = {**os.environ, **account, "WANDB_ERROR_REPORTING": "false"}
        settings = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True, "timeout": 300}
        done = subprocess.run(command, check=False, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(server.histories) == [run_id] and server.names == {run_id: "run"}
    read = [json.loads(line) for line in server.histories[run_id]]
    first = {}  # of a step that was done twice
    for line in tiny.lines(config.run.directory):
        if line["kind"] in ("step", "validation"):
            first.setdefault((line["kind"], line["step"]), line["loss"])
    for kind, name in (("step", "train/loss"), ("validation", "validation/loss")):
        assert [(line["step"], line[name]) for line in read if name in line] == sorted(
            (step, loss) for (one, step), loss in first.items() if one == kind
        )
    assert [step for kind, step in sorted(first) if kind == "step"] == list(range(1, 9))
    (settings,) = [config["run"]["value"] for config in server.configs[run_id] if "run" in config][:1]
    assert settings["steps"] == 6 and settings["directory"].endswith("/run")
