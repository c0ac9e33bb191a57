"""The launcher: how many ranks, what a failure is turned into. Whole runs through it: tests/cli/test_main.py."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from windlass.contract import has_agent
from windlass.errors import EXIT_STOPPED, UserError
from windlass.launch import local
from windlass.report.events import read_lines
from windlass.status import read_status, write_status
from windlass.supervise.heartbeat import read_beats

WORKER = """
import os, pathlib, signal, sys, time
run = pathlib.Path(os.environ["RUN"])
rank, case = int(os.environ["RANK"]), sys.argv[1]
from windlass import contract, errors, signals
from windlass.launch import local
from windlass.status import read_status, write_status
local.die_with_agent()  # the agent may be signalled while it starts the other rank
assert local.is_worker() and contract.has_agent()
held = signals.SIGNALS[0] in signal.pthread_sigmask(signal.SIG_BLOCK, ())
caught = signals.install_signals()  # as __main__ does first
assert held, "signals are held back until now"
for number in signals.SIGNALS:
    signal.signal(number, signal.SIG_DFL)  # these workers have nothing to save
if caught.received:  # the other rank failed while this one started: the launcher would wait 30 s for it
    os.kill(os.getpid(), caught.received)
kind, _, only = case.partition("-")
if hasattr(errors, kind) and only in ("", str(rank)):
    error = getattr(errors, kind)("given", "a rule", "a change")
    local.show_error(error)
    sys.exit(error.code)
if case == "crash" and rank == 1:
    (run / "logs" / "rank-1.log").write_text("first line\\nthe cause\\n")
if case in ("crash", "crash-unlogged") and rank == 1:
    sys.exit(7)
if case == "crash-0" and rank == 0:
    (run / "logs" / "rank-0.log").write_text("first line\\nthe cause\\n")
    sys.exit(7)
if case == "kill-0" and rank == 0:
    (run / "logs" / "rank-0.log").write_text("what the terminal has\\n")
    os.kill(os.getpid(), 9)
if case.startswith("stopped") and rank == 0:
    write_status(run, "stopped", 3, 75)
if case == "stopped-for-another" and rank == 1:
    sys.exit(75)
if case == "kill" and rank == 0:
    write_status(run, "running", 3, None)
if case == "terminated" and (run / f"starts-{rank}").exists():  # while the second start begins
    os.kill(os.getppid(), 15)
    time.sleep(600)
if case in ("recovers", "stuck", "mistaken", "stalls", "terminated"):
    from windlass.supervise.heartbeat import Heartbeat, folder_of
    beat = Heartbeat(folder_of(run), rank)
    starts = run / f"starts-{rank}"
    starts.write_text(f"{starts.read_text() if starts.exists() else ''}{os.environ['MASTER_PORT']} ")
    if rank == 0:
        write_status(run, "running", 4, None)
    beat.beat("data", 4, 64)
    counted = lambda of: len((run / f"starts-{of}").read_text().split()) if (run / f"starts-{of}").exists() else 0
    while rank and (read_status(run).step not in (4, 9) or counted(0) < counted(1)):  # the end of this rank ends rank 0
        time.sleep(0.01)
    while case == "mistaken" and not (run / "starts-1").exists():  # rank 0's end would end it before it is counted
        time.sleep(0.01)
    if case == "mistaken":
        local.show_error(errors.UserError("given", "a rule", "a change"))
        sys.exit(2)
    if counted(rank) > 2 and case != "stuck":
        if rank == 0:
            write_status(run, "finished", 9, 0)
        os._exit(0)
    if case == "stalls":
        for step in range(5, 17):  # longer than the watchdog's polls are apart, so that it sees phases end
            time.sleep(0.4)
            beat.beat("step", step, 64)
        if rank == 0:
            beat.beat("record", 17)
    elif rank == 1:
        os._exit(7) if case == "stuck" else os.kill(os.getpid(), 9)
if case.startswith("lingers"):
    import atexit, threading
    from windlass.supervise.heartbeat import Heartbeat, folder_of
    _, state, how = case.split("-")
    with Heartbeat(folder_of(run), rank, is_watched=True) as beat:
        beat.beat("end", 4)
        if rank == 0:
            write_status(run, state, 4, 0 if state == "finished" else 75)
        if how == "destroy" and rank == 1:
            time.sleep(600)
    if how == "thread" and rank == 1:
        threading.Thread(target=time.sleep, args=(600,)).start()
    if how == "atexit" and rank == 1:
        atexit.register(time.sleep, 600)
    sys.exit(0)
if case == "interrupted-twice":  # they would save for minutes
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, lambda *_: os.kill(os.getppid(), signal.SIGINT) if rank == 0 else None)
    if rank == 0:
        write_status(run, "running", 3, None)
        os.kill(os.getppid(), signal.SIGINT)
if case.startswith("signalled") and rank == 0:
    if case == "signalled-saved":
        write_status(run, "stopped", 3, 75)
    if case == "signalled-running":
        write_status(run, "running", 3, None)
    if case == "signalled-finished":
        write_status(run, "finished", 3, 0)
    os.kill(os.getppid(), int(case.rpartition("-")[2]) if case[-1:].isdigit() else 15)
if case == "kill" and rank == 1:
    while read_status(run).step != 3:  # of rank 0
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
if case not in ("good", "stopped"):
    time.sleep(600)
"""


@pytest.fixture
def gpus(monkeypatch):
    """gpus(n): as if n GPUs were visible."""
    return lambda count: monkeypatch.setattr(local, "count_gpus", lambda: count)


def test_more_ranks_than_cores_are_said_where_they_train_on_the_cpu(gpus, monkeypatch):
    gpus(0)
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda _pid: {3, 5})
    assert local.shared_cores(2) is None
    said = "4 ranks share 2 cores: they take turns, and all wait for the slowest; --nproc 2 has a core for each"
    assert local.shared_cores(4) == said
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda _pid: {3})
    assert local.shared_cores(2) == "2 ranks share 1 core: they take turns, and all wait for the slowest"
    gpus(4)
    assert local.shared_cores(4) is None


def test_ranks_are_all_gpus_else_one_unless_said(gpus, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    gpus(0)
    assert [local.choose_ranks(nproc) for nproc in (None, "auto", "1", "5")] == [1, 2, 1, 5]
    gpus(4)
    assert [local.choose_ranks(nproc) for nproc in (None, "auto", "1", "4")] == [4, 4, 1, 4]
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    gpus(0)
    assert local.choose_ranks("auto") == 1


@pytest.mark.parametrize("nproc", ["0", "-1", "two", "1.5", ""])
def test_what_is_no_number_of_processes_is_refused(gpus, nproc):
    gpus(0)
    with pytest.raises(UserError) as caught:
        local.choose_ranks(nproc)
    assert caught.value.given == f"--nproc {nproc}" and "from 1, or auto" in caught.value.rule


@pytest.mark.parametrize(("count", "word"), [(1, "1 visible GPU"), (2, "2 visible GPUs")])
def test_more_ranks_than_gpus_are_refused(gpus, count, word):
    gpus(count)
    with pytest.raises(UserError) as caught:
        local.choose_ranks(str(count + 1))
    assert caught.value.given == f"--nproc {count + 1} on a machine with {word}"
    assert f"use --nproc {count} or less" in caught.value.change and "CUDA_VISIBLE_DEVICES=" in caught.value.change


def test_hidden_gpus_are_none_and_torch_is_asked_only_where_a_driver_is(monkeypatch):
    monkeypatch.setattr(local, "COUNT", (sys.executable, "-c", "print(3)"))
    monkeypatch.setattr(Path, "exists", lambda self: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local.count_gpus() == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local.count_gpus() == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(Path, "exists", lambda self: False)
    assert local.count_gpus() == 0


def test_a_process_knows_who_started_it(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "WINDLASS_AGENT_PID"):
        monkeypatch.delenv(name, raising=False)
    assert not (local.is_worker() or has_agent())
    local.die_with_agent()  # nothing to die with
    monkeypatch.setenv("RANK", "0")
    assert not local.is_worker()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert local.is_worker() and not has_agent()


@pytest.mark.parametrize(("world", "word"), [("1", "1 process "), ("2", "2 processes ")])
def test_a_rank_of_another_launcher_starts_no_others(monkeypatch, world, word):
    monkeypatch.delenv("RANK", raising=False)
    local.check_nproc("2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", world)
    local.check_nproc(None)
    with pytest.raises(UserError, match=f"--nproc 2 in one of {word}that another launcher started"):
        local.check_nproc("2")
    monkeypatch.setenv("WINDLASS_AGENT_PID", "7")
    local.check_nproc("2")  # ours passes its own arguments on


def test_a_worker_whose_agent_is_gone_dies_at_once():
    code = "from windlass.launch.local import die_with_agent; die_with_agent(); print('alive')"
    for pid, code_and_output in ((str(os.getpid()), (0, "alive\n")), ("1", (-9, ""))):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "WINDLASS_AGENT_PID": pid}, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == code_and_output


def test_what_a_process_without_launcher_prints_goes_to_its_terminal(monkeypatch, capsys):
    monkeypatch.delenv("WINDLASS_ERRORS", raising=False)
    local.show_error(UserError("given", "a rule", "a change"))
    assert capsys.readouterr().err == "windlass: given\n  rule:   a rule\n  change: a change\n"


def test_what_an_error_quotes_from_a_file_cannot_drive_the_terminal(monkeypatch, capsys):
    monkeypatch.delenv("WINDLASS_ERRORS", raising=False)
    local.show_error(UserError("a name: \x1b]0;owned\x07", "two\nlines", "a change"))
    assert capsys.readouterr().err == "windlass: a name: \\x1b]0;owned\\x07\n  rule:   two\nlines\n  change: a change\n"


@pytest.fixture
def launched(tmp_path):
    """launch(*cases): the end of each, one after the other in a process of their own. A case says what the two workers do."""
    package = tmp_path / "replaced" / "windlass"
    package.mkdir(parents=True)
    source = Path(local.__file__).parents[1]
    for name in (
        "launch",
        "supervise",
        "contract.py",
        "output.py",
        "signals.py",
        "errors.py",
        "status.py",
        "safe_text.py",
        "hardware.py",
        "units.py",
        "report",
    ):
        (package / name).symlink_to(source / name)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(WORKER)
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "events.jsonl").write_text('{"kind": "torn')  # by the kill of rank 0
    older = time.time() - 100  # of another command, on the same directory
    (run / "logs" / "rank-1.log").write_text("an older log\n")
    os.utime(run / "logs" / "rank-1.log", (older, older))
    (run / "status.json").write_text(json.dumps({"state": "stopped", "step": 2, "exit_code": 75, "time": older}))

    def launch(*cases, trains=True, restarts=0, stall_s=0):
        temporary = tmp_path / "temporary"
        temporary.mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", LAUNCHES, json.dumps(cases), json.dumps([restarts, stall_s] if trains else None)],
            env={**os.environ, "PYTHONPATH": str(tmp_path / "replaced"), "RUN": str(run), "TMPDIR": str(temporary)},
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert not any(temporary.iterdir()), "a launch leaves nothing behind"
        assert done.returncode == 0, done.stderr
        ends = [End(code, step, said) for (code, step), said in zip(json.loads(done.stdout), done.stderr.split("\0"))]
        assert len(ends) == len(cases)
        return ends

    return launch


LAUNCHES = """
import json, os, pathlib, sys
from windlass.launch.local import launch_ranks
from windlass.launch.restarts import Restarts
from windlass.status import read_status, write_status
from windlass.supervise import watchdog
watchdog.LEAVE_S = 1.0
run, ends, given = pathlib.Path(os.environ["RUN"]), [], json.loads(sys.argv[2])
for case in json.loads(sys.argv[1]):
    try:
        code = launch_ranks([case], 2, run, Restarts(*given, 0, "samples up to {}".format) if given else None)
    except KeyboardInterrupt:
        code = "interrupted"
    ends.append((code, read_status(run).step))
    print("\\0", end="", file=sys.stderr, flush=True)
assert "torch" not in sys.modules, "a launcher stays small for as long as its ranks live"
print(json.dumps(ends))
"""


class End(NamedTuple):
    code: int
    step: int
    """Of the run's status, afterwards."""
    said: str


LOG = "an older log\n(the end of {}/run/logs/rank-1.log)\n"
STATED = "windlass: given\n  rule:   a rule\n  change: a change\n"


def test_an_error_is_printed_once_whichever_ranks_raise_it_and_its_code_is_the_launchers(launched):
    codes = {"UserError": 2, "UserError-1": 2, "Diverged": 4, "OutOfSync": 5, "Unavailable-1": 74}
    assert [(end.code, end.said) for end in launched(*codes)] == [(code, STATED) for code in codes.values()]


def test_a_failure_names_the_rank_and_shows_its_log_but_none_of_an_earlier_command(launched, tmp_path):
    unlogged, crash, killed, crash_0, kill_0 = launched("crash-unlogged", "crash", "kill", "crash-0", "kill-0")
    shown = f"first line\nthe cause\n(the end of {tmp_path}/run/logs/rank-0.log)\n"
    assert crash_0.said == f"windlass: rank 0 failed first, with exit code 7\n{shown}"
    assert kill_0.said == "windlass: rank 0 failed first, with signal SIGKILL\n", (
        "it wrote to the terminal, and no traceback"
    )
    assert unlogged.code == 7 and unlogged.said == "windlass: rank 1 failed first, with exit code 7\n"
    assert crash.code == 7
    assert crash.said.startswith("windlass: rank 1 failed first, with exit code 7\nfirst line\nthe cause")
    assert f"(the end of {tmp_path}/run/logs/rank-1.log)" in crash.said
    assert killed.code == 128 + 9 and "rank 1 failed first, with signal SIGKILL" in killed.said
    status = read_status(tmp_path / "run")
    assert (status.state, status.step, status.exit_code) == ("failed", 3, 137), "the ranks could not write it"


def test_a_stop_is_one_that_this_launch_wrote(launched):
    good, stopped, for_another = launched("good", "stopped", "stopped-for-another")
    assert (good.code, good.step) == (0, 2), "an older stop is not this command's"
    assert (stopped.code, for_another.code, for_another.said) == (EXIT_STOPPED, EXIT_STOPPED, ""), "no failure"
    assert launched("stopped", trains=False)[0].code == 0, "evaluate beside a run that is stopped meanwhile"


def starts(tmp_path):
    """How often rank 1 was started since the last look, each time at a port of its own."""
    file = tmp_path / "run" / "starts-1"
    ports = file.read_text().split()
    for rank in range(2):
        (tmp_path / "run" / f"starts-{rank}").unlink()
    assert len(set(ports)) == len(ports)
    return len(ports)


def incidents(tmp_path):
    """Since the last look."""
    file = tmp_path / "run" / "events.jsonl"
    found = read_lines(file)
    file.write_text("")
    return found


def test_ranks_that_died_start_again_until_there_are_no_restarts_left(launched, tmp_path):
    (end,) = launched("recovers", restarts=2)
    assert (end.code, end.step, starts(tmp_path)) == (0, 9, 3)
    died = "windlass: rank 1 failed first, with signal SIGKILL in step 5, phase data\n"
    restart = "windlass: restart {} of 2, from the last commit\n"
    assert end.said.replace(LOG.format(tmp_path), "") == died + restart.format(1) + died + restart.format(2)
    assert [(one["cause"], one["ranks"], one["step"], one["restart"]) for one in incidents(tmp_path)] == [
        ("died", [1], 4, 1),
        ("died", [1], 4, 2),
    ]
    assert not read_beats(tmp_path / "run")
    (end,) = launched("recovers", restarts=1)
    assert (end.code, read_status(tmp_path / "run").state, starts(tmp_path)) == (137, "failed", 2)
    assert end.said.endswith("the ranks are not started again after 1 restarts (launch.max_restarts=1)\n")


def test_a_mistake_is_not_tried_again_and_a_step_not_for_the_fourth_time(launched, tmp_path):
    (end,) = launched("mistaken", restarts=3)
    assert (end.code, end.said, starts(tmp_path)) == (2, STATED, 1)
    (end,) = launched("stuck", restarts=9)
    assert (end.code, starts(tmp_path)) == (7, 3)
    assert end.said.endswith("windlass: three failures in step 5: the ranks are not started again\nsamples up to 64\n")


@pytest.mark.long  # a stall is ten times the longest phase, and the watchdog looks once a second
def test_a_rank_that_stalls_is_named_and_all_start_again(launched, tmp_path):
    (end,) = launched("stalls", restarts=2, stall_s=1)
    assert (end.code, end.step, starts(tmp_path)) == (0, 9, 3)
    assert end.said.count("windlass: rank 1 stalls in step 17, phase step: nothing for ") == 2
    assert "rank 0: step 17, record for " in end.said and "rank 1: step 16, step for " in end.said
    assert [(one["cause"], one["ranks"], one["phase"]) for one in incidents(tmp_path)] == [("stalled", [1], "step")] * 2


@pytest.mark.parametrize(
    ("case", "code", "at"),
    [
        ("finished-thread", 0, "threading.py"),
        pytest.param("finished-atexit", 0, "", marks=pytest.mark.long),  # C calls what a library has registered
        pytest.param("finished-destroy", 0, "windlass/__main__.py", marks=pytest.mark.long),
        pytest.param("stopped-thread", EXIT_STOPPED, "threading.py", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_does_not_leave_after_the_end_is_named_and_ended_and_the_run_is_what_it_was(
    launched, tmp_path, case, code, at
):
    (end,) = launched(f"lingers-{case}", restarts=2, stall_s=60)
    assert (end.code, end.step) == (code, 4), end.said
    assert "windlass: rank 1 does not exit, 1 s after the end of the run: killed, at " in end.said
    assert at in end.said and "restart" not in end.said
    (incident,) = incidents(tmp_path)
    assert (incident["cause"], incident["ranks"], incident["step"], incident["restart"]) == ("lingers", [1], 4, None)
    assert read_status(tmp_path / "run").state == case.partition("-")[0] and not read_beats(tmp_path / "run")


@pytest.mark.parametrize(
    ("case", "code"),
    [
        ("signalled-2", "interrupted"),
        *(pytest.param(f"signalled-{number}", "interrupted", marks=pytest.mark.long) for number in (1, 10, 15)),
        ("signalled-running", 143),
        ("signalled-saved", EXIT_STOPPED),
        ("signalled-finished", 0),
    ],
)
def test_a_signal_interrupts_ranks_that_have_not_begun_and_is_the_exit_code_of_those_that_did_not_save(
    launched, monkeypatch, case, code
):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    assert launched(case)[0].code == code


def test_a_signal_while_ranks_start_again_interrupts_them_too(launched, tmp_path, monkeypatch):
    """The status is of the ranks that failed before: these have not begun, and nothing of theirs is lost."""
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    (end,) = launched("terminated", restarts=2)
    assert (end.code, starts(tmp_path)) == ("interrupted", 1)
    assert end.said.endswith("windlass: restart 1 of 2, from the last commit\n")


def test_a_second_ctrl_c_waits_for_no_rank(launched, tmp_path):
    """One alone gives them ten minutes."""
    assert launched("interrupted-twice")[0].code == 130
    status = read_status(tmp_path / "run")
    assert (status.state, status.step, status.exit_code) == ("failed", 3, 130)


@pytest.mark.parametrize(
    ("state", "code", "settled", "left"),
    [
        ("finished", 0, 0, ("finished", 0)),
        ("finished", 143, 0, ("finished", 0)),  # the signal came after the last step
        ("finished", 1, 1, ("finished", 0)),  # a crash behind it is one
        ("stopped", 143, EXIT_STOPPED, ("stopped", EXIT_STOPPED)),
        ("stopped", 1, EXIT_STOPPED, ("stopped", EXIT_STOPPED)),
        ("running", 137, 137, ("failed", 137)),
        ("failed", 1, 1, ("failed", 1)),
        ("failed", 137, 137, ("failed", 137)),
        ("of a run before", 7, 7, ("failed", 7)),
        ("of a run before", 143, 143, ("finished", 0)),
    ],
)
def test_the_end_of_a_run_goes_by_its_status_and_by_how_its_ranks_ended(tmp_path, state, code, settled, left):
    tmp_path.joinpath("logs").mkdir()
    is_of_before = state == "of a run before"
    write_status(
        tmp_path, "finished" if is_of_before else state, 4, {"finished": 0, "stopped": 75, "failed": 1}.get(state, 0)
    )
    since_s = read_status(tmp_path).time + (1 if is_of_before else -1)
    assert local.settled_code(tmp_path, since_s, code) == settled
    status = read_status(tmp_path)
    assert (status.state, status.exit_code) == left


@pytest.mark.parametrize(
    ("given", "spins"),
    [
        ({}, "1000"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
        ({"GOMP_SPINCOUNT": "9"}, "9"),
        ({"KMP_BLOCKTIME": "0"}, None),
    ],
)
def test_threads_that_wait_fall_asleep_unless_the_user_has_chosen(given, spins):
    """Set by the command line before torch is imported."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    code = (
        "import os, sys, windlass.cli.main as main\n"
        "main.app = lambda: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)\n"
        "main.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environ | given, capture_output=True, text=True, check=True)
    assert done.stdout == f"{spins} False\n"
