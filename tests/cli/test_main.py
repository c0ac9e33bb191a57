"""The command line as a user meets it: through processes, with an empty environment, signalled and killed.

Each process costs seconds, so they are few, and all train the tiny recipe on data prepared once. Nothing here waits for a
fixed time: conditions are polled, with limits that only a dead process exceeds.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch.distributed as dist
import yaml

from tests import tiny
from windlass.checkpoint.commit import committed_steps
from windlass.cli import main as cli
from windlass.commands import smoke as rehearse
from windlass.commands.status import status as read_run
from windlass.errors import (
    EXIT_NOT_EQUAL,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    BadLayout,
    Diverged,
    OutOfSync,
    Unavailable,
    UserError,
    WindlassError,
)
from windlass.report.events import read_events, read_lines
from windlass.status import is_locked, read_status, write_status
from windlass.supervise.heartbeat import read_beats
from windlass.training import preflight
from windlass.version import __version__

LIMIT_S = 1800  # more than a process that lives takes on any machine
LONG_STEPS = 16  # of a run that is signalled: each takes 32 micro-batches, so that the signal comes in time


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with the recipe, its corpus, and its data prepared."""
    base = tmp_path_factory.mktemp("cli")
    tree = tiny.recipe(base).model_dump(mode="json", by_alias=True, exclude_none=True)
    (base / "tiny.yaml").write_text(yaml.safe_dump(tree))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        cli.app(["prepare", "tiny.yaml"], standalone_mode=False)
    return base


def environment(base):
    """As `env -i`, and one thread; a checkout that is tested by PYTHONPATH is the one that its processes run."""
    source = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
    return {"PATH": "/usr/bin:/bin", "HOME": str(base), "OMP_NUM_THREADS": "1", **source}


def start(base, *arguments, command=("-m", "windlass")):
    return subprocess.Popen(
        [sys.executable, *command, *arguments],
        cwd=base,
        env=environment(base),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process):
    """(exit code, stdout, stderr) of a process that ends by itself."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def windlass(base, *arguments, command=("-m", "windlass")):
    return finish(start(base, *arguments, command=command))


def wait_for(condition, process=None):
    """Polls until `condition()` is true -> its value."""
    until_s = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < until_s, "waited for too long"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.005)
    return value


def last_step(directory):
    """The last step in the event log, 0 where there is none yet."""
    events = directory / "events.jsonl"
    whole = events.read_text().rpartition("\n")[0] if events.is_file() else ""  # the last line may be half written
    return max((json.loads(line)["step"] for line in whole.splitlines() if '"kind": "step"' in line), default=0)


def assert_finished(directory, steps=tiny.STEPS):
    """Every step once, an end, and the last step committed."""
    events = read_events(directory / "events.jsonl")
    assert [line["step"] for line in events if line["kind"] == "step"] == list(range(1, steps + 1))
    assert (events[-1]["kind"], events[-1]["reason"]) == ("end", "finished")
    assert max(committed_steps(directory / "checkpoints")) == steps


def three_lines(text):
    """The lines of UserErrors in `text`; nothing else may be there."""
    assert "Traceback" not in text
    return [line.split(":")[0].strip() for line in text.strip().splitlines()]


# ---- before anything starts


def test_the_version_is_one_line_and_loads_no_torch():
    lines = ["import sys", "from windlass.cli.main import main", "sys.argv[1:] = ['--version']"]
    lines += ["try: main()", "finally: assert 'torch' not in sys.modules"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"windlass {__version__}\n", "")


def test_help_names_every_command_and_loads_no_torch():
    code = "import sys; from windlass.cli.main import app; app(['--help'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    help_text, _, modules = done.stdout.strip().rpartition("\n")
    for command in ("prepare", "train", "evaluate", "generate", "export", "report", "checkpoint"):
        assert command in help_text
    assert not {"torch", "transformers", "numpy"} & {module.split(".")[0] for module in modules.split()}


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["train", "tiny.yaml", "run.directory=new", "optim.lerning_rate=1"], "optim.lerning_rate"),
        (["train", "tiny.yaml", "run.directory=new", "--nproc", "0"], "--nproc 0"),
        (["train", "tiny.yaml", "run.directory=new", "--nproc", "many"], "--nproc many"),
        (
            ["train", "tiny.yaml", "run.directory=new", "--nproc", "3"],
            "run.tokens_per_step=128 (8 sequences) on 3 ranks",
        ),
        (
            ["train", "tiny.yaml", "run.directory=new", "parallel.shard=2"],
            "parallel.replicate=1, parallel.shard=2 on 1 rank",
        ),
        (["train", "nothing.yaml"], "no recipe at nothing.yaml"),
        (["train", "tiny.yaml", "--run.steps", "5"], "windlass train --run.steps"),
        (["prepare", "tiny.yaml", "data.directory=new", "data.sources=[{path: nowhere}]"], "nowhere"),
        (["evaluate", "new"], "new"),
        (["evaluate", "new", "--tasks", "x.yaml", "--nproc", "2"], "--tasks x.yaml"),
        (["generate", "new"], "new"),
        (["generate", "new", "--chat", "--record"], "--chat without a prompt"),
        (["generate", "new", "--prompts", "none.txt"], "none.txt"),
        (["export", "new", "--push", "name"], "--push name"),
        (["export", "new"], "new"),
        (["report", "new"], "new"),
        (["checkpoint", "list", "new"], "new"),
        (["checkpoint", "verify", "new"], "new"),
        (["checkpoint", "prune", "new"], "new"),
        (["checkpoint", "diff", "new", "new"], "new"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_three_lines_and_exit_code_2_and_creates_nothing(base, monkeypatch, capsys, arguments, given):
    monkeypatch.chdir(base)
    monkeypatch.setattr(sys, "argv", ["windlass", *arguments])
    before = sorted(base.rglob("*"))
    with pytest.raises(SystemExit) as caught:
        cli.main()
    if dist.is_initialized():  # evaluate had begun; in a process of its own this ends with it
        dist.destroy_process_group()
    assert caught.value.code == EXIT_USER_ERROR
    err = capsys.readouterr().err
    assert given in err.splitlines()[0]
    assert three_lines(err) == ["windlass", "rule", "change"]
    assert sorted(base.rglob("*")) == before


def test_the_process_exits_with_2_too(base):
    done = windlass(base, "train", "tiny.yaml", "run.directory=new", "run.stepz=3")
    assert done.returncode == EXIT_USER_ERROR and done.stdout == ""
    assert three_lines(done.stderr) == ["windlass", "rule", "change"]
    assert "did you mean `steps`?" in done.stderr and not (base / "new").exists()


def test_more_ranks_than_cores_are_said_before_they_start(base, monkeypatch, capsys):
    monkeypatch.chdir(base)
    monkeypatch.setattr(cli.local, "count_gpus", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    monkeypatch.setattr(cli.local, "launch_ranks", lambda *_arguments: print("starts") or EXIT_USER_ERROR)
    cli.app(["train", "tiny.yaml", "run.directory=crowd", "--nproc", "2"], standalone_mode=False)
    assert re.fullmatch(r"2 ranks share 1 core: .+\nstarts\n", capsys.readouterr().out)


def test_smoke_hands_the_recipe_to_the_rehearsal_and_its_exit_code_back(base, monkeypatch):
    calls = []
    monkeypatch.setattr(rehearse, "rehearse", lambda *arguments: calls.append(arguments) or 5)
    monkeypatch.chdir(base)
    monkeypatch.setattr(sys, "argv", ["windlass", "train", "tiny.yaml", "run.seed=2", "--nproc", "1", "--smoke"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 5 and not (base / "run").exists()
    assert calls == [("tiny.yaml", ["run.seed=2"], "1", base / "run")]


# ---- exit codes: the table of windlass.errors


def end_of(monkeypatch, *arguments):
    """What `windlass *arguments` ends with, in this process."""
    monkeypatch.setattr(sys, "argv", ["windlass", *map(str, arguments)])
    with pytest.raises(BaseException) as caught:
        cli.main()
    return caught.value


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("given", "rule", "change"), 2),
        (Diverged("given", "rule", "change"), 4),
        (OutOfSync("given", "rule", "change"), 5),
        (Unavailable("given", "rule", "change"), 74),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_becomes_its_exit_code(base, monkeypatch, capsys, error, code):
    def fail(*_, **__):
        raise error

    monkeypatch.chdir(base)
    monkeypatch.setattr(preflight, "prepare_only", fail)
    end = end_of(monkeypatch, "prepare", "tiny.yaml")
    assert isinstance(end, SystemExit) and end.code == code
    err = capsys.readouterr().err
    assert err == ("" if code == 130 else "windlass: given\n  rule:   rule\n  change: change\n")
    if isinstance(error, WindlassError):  # as it is raised on a rank that only waited
        error.elsewhere = True
        assert end_of(monkeypatch, "prepare", "tiny.yaml").code == code
        assert capsys.readouterr().err == "", "the rank where it happened shows it"


@pytest.mark.parametrize(
    "error", [BadLayout("given", "rule", "change"), KeyError("x")], ids=lambda one: type(one).__name__
)
def test_a_bug_of_ours_keeps_its_traceback(base, monkeypatch, capsys, error):
    def fail(*_, **__):
        raise error

    monkeypatch.chdir(base)
    monkeypatch.setattr(preflight, "prepare_only", fail)
    assert end_of(monkeypatch, "prepare", "tiny.yaml") is error, "Python prints its traceback and exits with 1"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("command", "door"), [("prepare", "prepare_only"), ("train", "make_ready")])
def test_rehash_is_a_setting_of_the_data(base, monkeypatch, command, door):
    asked = []

    def stop(config, *_, **__):
        asked.append(config.data.rehash)
        raise KeyboardInterrupt

    monkeypatch.chdir(base)
    monkeypatch.setattr(preflight, door, stop)
    for options in ([], ["--rehash"]):
        end_of(monkeypatch, command, "tiny.yaml", "run.directory=new", *options)
    assert asked == [False, True]


def test_a_store_that_does_not_answer_may_be_tried_again(base, monkeypatch, capsys):
    monkeypatch.chdir(base)
    place, short = "data.directory=http://127.0.0.1:9/x", "data.cache={directory: cache, deadline_s: 1}"
    assert end_of(monkeypatch, "train", "tiny.yaml", "run.directory=new", place, short).code == 74
    assert "failed for 1 s" in capsys.readouterr().err and not (base / "new").exists()


@pytest.mark.long
def test_a_run_that_diverges_ends_with_4_and_its_status_says_so(base):
    loud = ("optim.learning_rate=1e30", "optim.schedule=constant", "optim.warmup_steps=0", "optim.max_skips=2")
    directory = base / "diverged"
    done = windlass(base, "train", "tiny.yaml", "run.directory=diverged", *loud, "report.every_steps=1")
    assert done.returncode == 4 and three_lines(done.stderr) == ["windlass", "rule", "change"], done.stderr
    status = read_status(directory)
    assert (status.state, status.exit_code) == ("failed", 4) and 2 < status.step <= tiny.STEPS


# ---- a whole run


LEAVES_MODULES = """
import runpy, sys
name = sys.argv[3]
try:
    runpy.run_module("windlass", run_name="__main__", alter_sys=True)
finally:
    with open(f"{name}.modules", "w") as file:
        print(*sys.modules, file=file)
"""


@pytest.fixture(scope="module")
def one(base):
    """A finished run of one process."""
    arguments = ("train", "tiny.yaml", "run.directory=one")
    return base / "one", windlass(base, *arguments, command=("-c", LEAVES_MODULES))


@pytest.fixture(scope="module")
def two(base):
    """A finished run of two, which prints its events."""
    arguments = ("train", "tiny.yaml", "run.directory=two", "--nproc", "2", "--json")
    return base / "two", windlass(base, *arguments, command=("-c", LEAVES_MODULES))


def modules_of(base, name):
    """What the process of that run, or its launcher, had loaded at its end."""
    return (base / f"run.directory={name}.modules").read_text().split()


def test_the_launcher_of_two_loads_neither_torch_nor_data(base, two):
    """410 modules in its whole life; more in benchmarks/results/start.json."""
    assert two[1].returncode == 0, two[1].stderr
    modules = modules_of(base, "two")
    assert not {"torch", "numpy", "tokenizers", "transformers", "pyarrow"} & {name.split(".")[0] for name in modules}
    assert "windlass.launch.spawn" in modules and len(modules) < 500


def test_a_run_without_a_pipeline_loads_none(base, one):
    """torch's Optimizer loads dynamo by itself."""
    modules = modules_of(base, "one")
    assert "torch" in modules and "windlass.parallel.pipeline" in modules
    assert not [name for name in modules if name.startswith("torch.distributed.pipelining")]


def test_one_process_trains_with_an_empty_environment(one):
    directory, done = one
    assert (done.returncode, done.stderr) == (0, "")
    assert_finished(directory)
    assert " 1 on CPU\n  threads        1 per rank\n" in done.stdout
    assert (directory / "report.html").is_file() and (directory / "resolved.yaml").is_file()
    said = 'report: one/report.html; next: windlass generate one --prompt "...", or windlass export one'
    assert done.stdout.splitlines()[-1] == said
    status = read_status(directory)
    assert (status.state, status.step, status.exit_code) == ("finished", tiny.STEPS, 0)
    assert "global batch" in (directory / "logs" / "rank-0.log").read_text()


def test_two_processes_train_the_same_and_print_the_events_and_nothing_else(one, two):
    directory, done = two
    assert done.returncode == 0 and [json.loads(line) for line in done.stdout.splitlines()] == tiny.lines(directory)
    assert "finished at step 10 of 10" in done.stderr and "Traceback" not in done.stderr
    assert "next: windlass" not in done.stdout + done.stderr
    assert_finished(directory)
    expected, got = tiny.losses(one[0]), tiny.losses(directory)
    assert all(abs(got[step][0] - loss) <= 1e-5 for step, (loss, _) in expected.items())
    assert (directory / "logs" / "rank-1.log").is_file()
    assert (directory / "report.html").is_file(), "written by a process that is no rank"


def test_what_was_given_back_as_resolved_trains_again(base, one, monkeypatch):
    from windlass.config import load_recipe

    resolved = load_recipe(one[0] / "resolved.yaml")
    chosen = ("run.directory=one", "parallel.recompute=none", "parallel.compile=false", "precision.policy=fp32")
    assert resolved.model_dump() == load_recipe(base / "tiny.yaml", *chosen).model_dump()


@pytest.fixture
def call(base, monkeypatch, capsys):
    """call(*arguments): what a command prints, in this process, that ends with `code`."""
    monkeypatch.chdir(base)

    def call(*arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["windlass", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert caught.value.code == code
        return capsys.readouterr().out

    return call


def test_the_checkpoint_commands_read_a_run(one, call):
    steps = sorted(committed_steps(one[0] / "checkpoints"))
    assert all(str(step) in call("checkpoint", "list", one[0]) for step in steps)
    assert len(call("checkpoint", "verify", one[0]).splitlines()) == len(steps)
    last = one[0] / "checkpoints" / f"step-{steps[-1]:08d}"
    assert "equal, bit for bit" in call("checkpoint", "diff", last, last)
    first = one[0] / "checkpoints" / f"step-{steps[0]:08d}"
    assert "other values: model." in call("checkpoint", "diff", first, last, code=EXIT_NOT_EQUAL)
    target = one[0].parent / "moved"
    logged = call("checkpoint", "reshard", one[0], target, "parallel.shard=2", "parallel.tp=1")
    assert "for 2 ranks: shard 2" in logged and "every byte verified" in logged
    (equal,) = call("checkpoint", "diff", one[0], target).splitlines()
    assert equal.endswith("tensors are equal, bit for bit")
    assert "report.html" in call("report", one[0])


def refused(monkeypatch, capsys, *arguments):
    """What a command says that is one of two ranks."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WINDLASS_LAUNCHER", "a test")  # adopted already
    monkeypatch.setattr(sys, "argv", ["windlass", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == EXIT_USER_ERROR
    return capsys.readouterr().err


def test_a_rehearsal_under_a_launcher_is_refused(base, monkeypatch, capsys):
    assert "--smoke under a launcher" in refused(monkeypatch, capsys, "train", base / "tiny.yaml", "--smoke")


@pytest.mark.parametrize("command", ["export", "verify", "report", "status"])
def test_a_command_of_one_process_is_refused_as_one_of_several(tmp_path, monkeypatch, capsys, command):
    said = refused(monkeypatch, capsys, command, tmp_path)
    assert said.startswith(f"windlass: windlass {command} as one of 2 processes\n")
    assert f"run windlass {command} without the launcher" in said and "train, evaluate, prepare" in said


def test_the_status_of_a_run_is_a_line_or_an_object(tmp_path, call):
    write_status(tmp_path, "stopped", 3, 75)
    assert call("status", tmp_path) == "stopped at step 3; the same command goes on from its beginning\n"
    found = json.loads(call("status", tmp_path, "--json"))
    assert (found["state"], found["step"], found["exit_code"], found["checkpoint"]) == ("stopped", 3, 75, None)


def test_the_runs_below_a_directory_are_a_table_or_objects(tmp_path, call):
    write_status(tmp_path, "stopped", 3, 75)
    assert call("runs", tmp_path).splitlines()[1].split()[:3] == [tmp_path.name, "stopped", "3"]
    assert json.loads(call("runs", tmp_path, "--json"))["step"] == 3


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("windlass st", ["status", "stacks"]),
        ("windlass train demo optim.warm", ["optim.warmup_steps="]),
        ("windlass train demo optim.schedule=co", ["optim.schedule=cosine", "optim.schedule=constant"]),
        ("windlass train demo optim.schedule =", ["cosine", "wsd", "linear", "constant"]),  # as bash splits it
        ("windlass train demo optim.schedule = l", ["linear"]),
        ("windlass train demo = l", []),
        ("windlass keys data.tokenizer.tra", ["data.tokenizer.train"]),
        ("windlass keys ada", ["adapter"]),
        ("windlass sync RUN --to w", ["wandb"]),
    ],
)
def test_the_shell_completes_commands_and_keys(words, found):
    typed = {"_WINDLASS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    entry = "from windlass.__main__ import main; import sys; sys.argv = ['windlass']; main()"
    done = subprocess.run(
        [sys.executable, "-c", entry], env=os.environ | typed, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == found, done.stderr


# ---- signals


def long_run(name, *arguments):
    """No checkpoint is due on the way: what is there after a stop was saved because of it."""
    length = (f"run.steps={LONG_STEPS}", "run.tokens_per_step=512", "checkpoint.every_steps=1000")
    return ("train", "tiny.yaml", f"run.directory={name}", *length, *arguments)


def stop_and_finish(base, call, name, number, *arguments):
    """Signals a run in its second step or later; then the same command again finishes it."""
    directory = base / name
    process = start(base, *long_run(name, *arguments))
    wait_for(lambda: last_step(directory) >= 2, process)
    process.send_signal(number)
    done = finish(process)
    assert done.returncode == EXIT_STOPPED, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    events = read_events(directory / "events.jsonl")
    assert (events[-1]["kind"], events[-1]["reason"]) == ("end", "stopped")
    at, status = events[-1]["step"], read_status(directory)
    assert (status.state, status.step, status.exit_code) == ("stopped", at, EXIT_STOPPED)
    assert 2 <= at < LONG_STEPS and max(committed_steps(directory / "checkpoints")) == at
    call(*long_run(name, *arguments))
    assert any(line["kind"] == "resume" and line["step"] == at for line in read_events(directory / "events.jsonl"))
    assert_finished(directory, LONG_STEPS)


def test_ctrl_c_to_one_process_saves_and_the_same_command_goes_on(base, call):
    stop_and_finish(base, call, "interrupted", signal.SIGINT)


@pytest.mark.long
def test_sigterm_to_the_launcher_saves_and_the_same_command_goes_on(base, call):
    stop_and_finish(base, call, "terminated", signal.SIGTERM, "--nproc", "2")


@pytest.mark.long
def test_ctrl_c_to_the_launcher_saves_and_the_same_command_goes_on(base, call):
    stop_and_finish(base, call, "interrupted-2", signal.SIGINT, "--nproc", "2")


@pytest.fixture(scope="module")
def undisturbed(base):
    """The checkpoint of a long run on two ranks."""
    done = windlass(base, *long_run("undisturbed", "--nproc", "2"))
    assert done.returncode == 0, done.stderr
    return base / "undisturbed" / "checkpoints" / f"step-{LONG_STEPS:08d}"


@pytest.mark.long
@pytest.mark.parametrize(("number", "kind"), [(signal.SIGKILL, "died"), (signal.SIGSTOP, "stalled")])
def test_ranks_start_again_by_themselves_and_the_end_is_that_of_an_undisturbed_run(base, undisturbed, number, kind):
    name = f"{kind}-again"
    process = start(base, *long_run(name, "--nproc", "2", "checkpoint.every_steps=2", "launch.stall_s=1"))
    wait_for(lambda: last_step(base / name) >= 3, process)
    found = [json.loads(line) for line in windlass(base, "stacks", name, "--json").stdout.splitlines()]
    assert [place["rank"] for place in found] == [0, 1] and all(place["frames"] for place in found)
    os.kill(found[1]["pid"], number)
    done = finish(process)
    assert done.returncode == 0, done.stderr
    assert "windlass: restart 1 of 3, from the last commit" in done.stderr
    (incident,) = (line for line in read_lines(base / name / "events.jsonl") if line["kind"] == "incident")
    assert (incident["cause"], incident["ranks"], incident["restart"]) == (kind, [1], 1)
    same = windlass(base, "checkpoint", "diff", base / name / "checkpoints" / undisturbed.name, undisturbed)
    assert same.returncode == 0, same.stdout
    assert windlass(base, "stacks", name).returncode == EXIT_USER_ERROR, "nobody is there"


KILLS = 50


@pytest.mark.long
def test_every_kill_after_a_commit_is_one_restart_and_the_end_is_that_of_an_undisturbed_run(base):
    steps, draw, kills, seen, pids = 4 * KILLS, random.Random(3), 0, 0, set()
    length = (f"run.steps={steps}", "checkpoint.every_steps=1", f"launch.max_restarts={KILLS}", "--nproc", "2")
    assert windlass(base, *long_run("left-alone", *length)).returncode == 0
    process = start(base, *long_run("killed-often", *length))
    checkpoints, said = base / "killed-often" / "checkpoints", []
    reader = threading.Thread(target=lambda: said.extend(process.communicate()))  # a pipe holds less than 50 starts say
    reader.start()

    def next_ranks():
        """Those of a start that has committed a step."""
        newest = max(committed_steps(checkpoints), default=0) if checkpoints.is_dir() else 0
        beats = [beat for beat in read_beats(base / "killed-often") if beat.is_alive and beat.pid not in pids]
        return beats if newest > seen and len(beats) == 2 else None

    while kills < KILLS:
        beats = wait_for(next_ranks, process)
        seen = max(committed_steps(checkpoints))
        pids |= {beat.pid for beat in beats}
        os.kill(draw.choice(beats).pid, signal.SIGKILL)
        kills += 1
    reader.join(LIMIT_S)
    incidents = [line for line in read_lines(base / "killed-often" / "events.jsonl") if line["kind"] == "incident"]
    assert process.returncode == 0, said[1][-2000:]
    assert [incident["restart"] for incident in incidents] == list(range(1, KILLS + 1)), "the first restart works"
    assert {incident["exit_code"] for incident in incidents} == {-9}, "the killed rank is the one that is named"
    name = f"step-{steps:08d}"
    same = windlass(base, "checkpoint", "diff", checkpoints / name, base / "left-alone" / "checkpoints" / name)
    assert same.returncode == 0, same.stdout


@pytest.mark.long
def test_a_killed_launcher_leaves_no_process_and_no_lock_and_the_same_command_goes_on(base, undisturbed):
    directory, command = base / "killed", long_run("killed", "--nproc", "2", "checkpoint.every_steps=2")
    process = start(base, *command)
    wait_for(lambda: last_step(directory) >= 3, process)
    left = psutil.Process(process.pid).children(recursive=True)
    assert sum("windlass" in child.cmdline() for child in left) == 2
    process.kill()
    process.wait(LIMIT_S)
    _, alive = psutil.wait_procs(left, timeout=LIMIT_S)
    for child in alive:
        child.kill()
    assert not alive and not is_locked(directory)
    _, err = process.communicate()
    at = max(committed_steps(directory / "checkpoints"))
    assert at >= 2 and last_step(directory) < LONG_STEPS
    for said in (err, (directory / "logs" / "rank-1.log").read_text()):
        assert "Traceback" not in said, "they were killed, and did not just lose the launcher's store"
    assert read_run(directory).state == "dead"
    done = windlass(base, *command)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in read_lines(directory / "events.jsonl") if line["kind"] == "resume"] == [at]
    same = windlass(base, "checkpoint", "diff", directory / "checkpoints" / undisturbed.name, undisturbed)
    assert same.returncode == 0, same.stdout
