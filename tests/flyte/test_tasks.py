"""The pipeline, run: by Flyte's local execution, and task `train` by the entry point of its container, with two ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import tiny
from tests.data.prepare.test_prepare import content
from windlass.checkpoint.keep import diff
from windlass.config import to_yaml
from windlass.data.prepare.prepare import prepare
from windlass.launch.config import FlyteConfig
from windlass.launch.flyte import driver
from windlass.status import read_status

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
OTHER = ROOT / ".venv-flyte/bin/python"
LIMIT_S = 1800  # more than a process that lives takes on any machine
CRASH = """
import os
from pathlib import Path
from windlass.training import loop
clip, done = loop.gradient_norm, []
def crash_once(*arguments):
    done.append(1)
    if len(done) == 8 and os.environ.get("RANK", "0") == "0" and not Path("crashed").exists():
        Path("crashed").touch()
        raise RuntimeError("planted in step 8")
    return clip(*arguments)
loop.gradient_norm = crash_once
"""


@pytest.fixture(scope="module")
def python():
    """An interpreter that has Flyte."""
    if find_spec("flyte") is not None:
        return sys.executable
    if not OTHER.is_file():
        pytest.skip("Flyte is not installed: sh scripts/flyte_environment.sh")
    return str(OTHER)


@pytest.fixture
def base(tmp_path):
    (tmp_path / "r.yaml").write_text(to_yaml(tiny.recipe(tmp_path)))
    (tmp_path / "plant.py").write_text(CRASH)
    return tmp_path


def environment(base):
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WINDLASS_LAUNCHER")
    kept = {name: value for name, value in os.environ.items() if name not in launchers}
    path = os.pathsep.join([str(base), str(ROOT / "src"), str(ROOT)])
    return {**kept, "OMP_NUM_THREADS": "1", "HOME": str(base / "home"), "PYTHONPATH": path}


def local(python, base, *overrides, planted=""):
    """`windlass launch flyte --local` in `base` -> the process, finished."""
    (base / "home").mkdir(exist_ok=True)
    start = f"import sys{planted}; from windlass.cli.main import main; sys.argv[0] = 'windlass'; main()"
    command = [python, "-c", start, "launch", "flyte", "r.yaml", *overrides, "--local"]
    pipes = {"capture_output": True, "text": True, "timeout": LIMIT_S}
    return subprocess.run(command, cwd=base, env=environment(base), **pipes)


def prepared_by(done):
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout.count("task prepare: ")


ON_THE_VOLUME = """
import types, flyte
from windlass.config import load_recipe
from windlass.flyte import tasks
flyte.ctx = lambda: types.SimpleNamespace(mode="remote")
config = load_recipe("r.yaml", "launch.flyte.mount=/runs")
print([tasks._outlives_the_pod(config, place) for place in ("/runs/mine", "/runs", "/runs-of-this-pod/mine", "s3://b/x")])
"""


def test_a_directory_beside_the_volume_is_not_on_it(python, base):
    done = subprocess.run(
        [python, "-c", ON_THE_VOLUME], cwd=base, env=environment(base), capture_output=True, text=True
    )
    assert done.stdout == "[True, True, False, True]\n", done.stderr


def test_a_second_run_skips_prepare_and_a_changed_setting_prepares_beside_it(python, base):
    first = local(python, base)
    assert prepared_by(first) == 1
    assert first.stdout.splitlines()[-2:] == [
        f"checkpoint: {base}/run/checkpoints/step-{tiny.STEPS:08d}",
        f"export: {base}/run/export",
    ]
    report = Path(first.stdout.splitlines()[-3].removeprefix("report: "))
    (page,) = [file.read_text() for file in report.rglob("report.html") if "training loss" in file.read_text()]
    assert ">finished</span>" in page and len(page) < 300_000
    assert prepared_by(local(python, base, f"run.directory={base}/second", "optim.learning_rate=1e-3")) == 0
    assert tiny.losses(base / "second").keys() == tiny.losses(base / "run").keys()
    assert prepared_by(local(python, base, f"run.directory={base}/third", "data.sequence_length=8")) == 1
    folders = [folder for folder in (base / "data").iterdir() if not folder.name.startswith(".")]
    assert len(folders) == 2 and all((folder / "prepared.json").is_file() for folder in folders)


def test_parts_are_made_once_and_are_the_data_that_one_task_prepares(python, base):
    first = local(python, base, "launch.flyte.prepare_parts=3")
    assert prepared_by(first) == 1
    said = [line.partition(": ")[0] for line in first.stdout.splitlines() if line.startswith("task ")]
    assert said == ["task part 0/3", "task part 1/3", "task part 2/3", "task prepare"]
    (made,) = [folder for folder in (base / "data").iterdir() if not folder.name.startswith(".")]
    alone = tiny.recipe(base).data.changed(directory=str(base / "alone"))
    assert content(made) == content(prepare(alone, {}, log=lambda _line: None).directory)
    assert [name.name for name in (base / "data").iterdir() if name.name.endswith(".parts")] == []
    for parts in ("launch.flyte.prepare_parts=2", "launch.flyte.prepare_parts=null"):
        again = local(python, base, f"run.directory={base}/again", parts)
        assert prepared_by(again) == 0 and "task part" not in again.stdout, "cached, however it was made"


def test_a_crash_is_retried_and_goes_on_from_the_last_checkpoint(python, base):
    done = local(python, base, "launch.flyte.retries=1", planted=", plant")
    assert prepared_by(done) == 1 and (base / "crashed").exists()
    assert [line["step"] for line in tiny.lines(base / "run") if line["kind"] == "resume"] == [6]
    prepared_by(local(python, base, f"run.directory={base}/never-stopped"))
    assert tiny.losses(base / "run") == tiny.losses(base / "never-stopped")
    last = f"checkpoints/step-{tiny.STEPS:08d}"
    assert diff(base / "run" / last, base / "never-stopped" / last).bytes == []


def test_a_mistake_in_a_task_is_not_retried_and_is_an_exit_code(python, base):
    prepared_by(local(python, base))
    done = local(python, base, "launch.flyte.retries=3", "run.seed=9")  # of a run that has begun with another
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert (
        done.stderr.startswith("windlass: run.seed: 4 in the checkpoint, 9 now\n  rule:")
        and done.stderr.count("rule:") == 1
    )
    assert "Traceback" not in done.stderr


def test_a_pipeline_is_not_run_here_where_flyte_is_not_configured_or_does_not_answer(python, base):
    (base / "home/.flyte").mkdir(parents=True)
    command = [python, "-m", "windlass", "launch", "flyte", "r.yaml", "launch.flyte.image=i:1"]
    pipes = {"capture_output": True, "text": True, "timeout": LIMIT_S}
    done = subprocess.run(command, cwd=base, env=environment(base), **pipes)
    assert done.returncode == 2 and "windlass: Flyte is not configured here" in done.stderr, (done.stdout, done.stderr)
    there = "admin: {endpoint: 'dns:///localhost:1', insecure: true}\ntask: {project: p, domain: d, org: o}\n"
    (base / "home/.flyte/config.yaml").write_text(there)
    done = subprocess.run(command, cwd=base, env=environment(base), **pipes)
    assert done.returncode == 74 and "windlass: Flyte does not answer" in done.stderr, (done.stdout, done.stderr)
    assert not (base / "run").exists()


def container(python, base, name, *overrides, planted=False, start_from=()):
    """The command of task `train`'s container, with two ranks, on the data that is in `base` -> its process and its folder."""
    act = base / f"act-{name}"
    for folder in ("out", "raw"):
        (act / folder).mkdir(parents=True)
    text, body = driver(FlyteConfig(image="none"), "tiny", 2), "    return tasks.train("
    assert body in text
    (base / "windlass_pipeline.py").write_text(text.replace(body, f"    import plant\n\n{body}") if planted else text)
    (base / "home").mkdir(exist_ok=True)
    given = [f"run.directory={base / name}", *overrides]
    arguments = [act / "inputs.pb", base / "r.yaml", base / "data", json.dumps(given), *start_from]
    command = [python, str(ROOT / "tests/flyte/inputs.py"), *map(str, arguments)]
    subprocess.run(command, cwd=base, env=environment(base), check=True, capture_output=True, timeout=LIMIT_S)
    backend = {"_U_EP_OVERRIDE": "localhost:1", "_U_ORG_NAME": "o", "ACTION_NAME": "a0", "RUN_NAME": "r1"}
    backend |= {
        "FLYTE_INTERNAL_EXECUTION_PROJECT": "p",
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": "d",
        "_U_RUN_BASE": str(act),
    }
    resolver = "flyte._internal.resolvers.default.DefaultTaskResolver"
    entry = [str(Path(python).with_name("a0")), "--inputs", str(act / "inputs.pb"), "--outputs-path", str(act / "out")]
    entry += ["--version", "v1", "--raw-data-path", str(act / "raw"), "--resolver", resolver]
    entry += ["mod", "windlass_pipeline", "instance", "train"]
    with (act / "log").open("wb") as log:
        process = subprocess.Popen(entry, cwd=base, env=environment(base) | backend, stdout=log, stderr=log)
    return process, act


def finished(process, act):
    """-> the container's words. It has outputs, and no error."""
    assert process.wait(LIMIT_S) == 0, (act / "log").read_text()[-4000:]
    assert (act / "out/outputs.pb").is_file() and not (act / "out/error.pb").exists(), (act / "log").read_text()[-4000:]
    return (act / "log").read_text()


def error_of(python, base, act):
    command = [python, str(ROOT / "tests/flyte/inputs.py"), "--error", str(act / "out/error.pb")]
    done = subprocess.run(command, env=environment(base), check=True, capture_output=True, text=True, timeout=LIMIT_S)
    return json.loads(done.stdout)


def trained(base, name, *overrides):
    """An undisturbed run on two ranks of our own launcher."""
    command = [sys.executable, "-m", "windlass", "train", "r.yaml", f"run.directory={name}", *overrides, "--nproc", "2"]
    subprocess.run(command, cwd=base, env=environment(base), check=True, capture_output=True, timeout=LIMIT_S)


def test_two_ranks_of_the_container_train_what_our_own_launcher_trains(python, base):
    trained(base, "ours")
    words = finished(*(started := container(python, base, "theirs")))
    assert "2 ranks, started by torchrun" in words
    assert tiny.losses(base / "theirs") == tiny.losses(base / "ours")
    outputs = (started[1] / "out/outputs.pb").read_bytes()  # where Flyte's store is a local path, it copies nothing
    for place in (f"{base}/theirs/checkpoints/step-{tiny.STEPS:08d}", f"{base}/theirs/export"):
        assert place.encode() in outputs and Path(place).is_dir()
    page = (started[1] / "out/report.html").read_text()
    assert ">finished</span>" in page and len(page) < 300_000


def test_a_run_begins_from_the_checkpoint_that_another_gave_back(python, base):
    trained(base, "ours")
    checkpoint = base / f"ours/checkpoints/step-{tiny.STEPS:08d}"
    trained(base, "begun-by-us", f"run.start_from={checkpoint}")
    finished(*container(python, base, "begun", start_from=[f"file://{checkpoint}"]))
    assert tiny.losses(base / "begun") == tiny.losses(base / "begun-by-us") != tiny.losses(base / "ours")


def test_a_crash_in_the_container_is_an_error_that_is_retried_and_the_next_attempt_goes_on(python, base):
    trained(base, "ours")
    process, act = container(python, base, "crashed-run", planted=True)
    assert process.wait(LIMIT_S) == 0 and error_of(python, base, act)["retried"]
    finished(*container(python, base, "again", f"run.directory={base}/crashed-run"))
    assert [line["step"] for line in tiny.lines(base / "crashed-run") if line["kind"] == "resume"] == [6]
    assert tiny.losses(base / "crashed-run") == tiny.losses(base / "ours")


def test_a_mistake_in_the_container_is_an_error_that_is_not_retried(python, base):
    trained(base, "ours")
    process, act = container(python, base, "ours", "run.seed=9")
    assert process.wait(LIMIT_S) == 0
    error = error_of(python, base, act)
    assert not error["retried"] and "exited with 2" in error["message"] and "change:" in error["message"]


def test_sigterm_flushes_the_page_and_saves_and_the_next_attempt_goes_on(python, base):
    length = "run.steps=600"
    trained(base, "ours", length)
    process, act = container(python, base, "stopped", length)
    deadline_s = time.monotonic() + LIMIT_S
    while ("checkpoint", 30) not in (tiny.kinds(base / "stopped") if (base / "stopped/events.jsonl").exists() else []):
        assert process.poll() is None and time.monotonic() < deadline_s, (act / "log").read_text()[-4000:]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.wait(LIMIT_S)
    stopped = read_status(base / "stopped")
    assert (stopped.state, stopped.step < 600) == ("stopped", True)
    assert error_of(python, base, act)["retried"] and not (act / "out/outputs.pb").exists()
    assert ">stopped</span>" in (act / "out/report.html").read_text()
    finished(*container(python, base, "again", length, f"run.directory={base}/stopped"))
    assert [line["step"] for line in tiny.lines(base / "stopped") if line["kind"] == "resume"] == [stopped.step]
    assert tiny.losses(base / "stopped") == tiny.losses(base / "ours")
