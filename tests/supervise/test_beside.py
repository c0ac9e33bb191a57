"""A watchdog beside ranks of another launcher: it names one that stalls or dies, writes it down, and ends with who started it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from tests import tiny
from tests.hosts import agent_of, hosts, missing
from tests.supervise.hanging import ranks  # noqa: F401
from windlass.checkpoint.commit import committed_steps
from windlass.config import to_yaml
from windlass.report.events import EventLog, read_events
from windlass.supervise import beside
from windlass.supervise.beside import Hosts, Watch, WatchBeside, watched_beside
from windlass.supervise.heartbeat import process_state, read_beats
from windlass.training.preflight import prepare_only

LIMIT_S = 600  # more than a process that lives takes on any machine
QUIET = SimpleNamespace(is_out_of_memory=lambda: False, of_gpus=list)


def watching(tmp_path, **more):
    """A WatchBeside whose clock is four seconds later each time it is read."""
    now_s = [time.monotonic()]

    def clock():
        now_s[0] += 4
        return now_s[0]

    return WatchBeside(Watch(str(tmp_path), 20.0, 20.0, **more), os.getppid(), QUIET, clock)


def test_it_ends_with_the_rank_that_started_it_though_another_process_holds_the_pipe(tmp_path, log):
    """A fork of the rank keeps the pipe open: then only its parent shows that the rank is gone."""
    beside_one = watching(tmp_path)
    beside_one._parent = os.getpid()  # not this process's parent: the one that was has left
    asked = []
    beside_one.run(lambda seconds: asked.append(seconds) or len(asked) > 9)
    assert len(asked) == 1


def incidents(tmp_path):
    return [line for line in read_events(tmp_path / "events.jsonl") if line["kind"] == "incident"]


@pytest.fixture
def log(tmp_path):
    EventLog(tmp_path / "events.jsonl").write("start", 0, {})


def test_ranks_that_stall_are_named_written_down_and_killed(ranks, tmp_path, log, capsys):  # noqa: F811
    pids = [ranks(), ranks()]
    os.kill(pids[1], signal.SIGSTOP)
    watching(tmp_path).run(lambda _seconds: False)
    said = capsys.readouterr().err
    assert (
        said.startswith("windlass: rank 1 stalls in step 5, phase data: nothing for ") and "stopped (SIGSTOP)" in said
    )
    (line,) = incidents(tmp_path)
    assert (line["cause"], line["ranks"], line["restart"], len(line["stacks"])) == ("stalled", [1], None, 2)
    assert said.endswith(f"{beside.KILLS}\n")
    end_s = time.monotonic() + LIMIT_S
    while any(beat.is_alive for beat in read_beats(tmp_path)):
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_rank_that_is_killed_is_named_once_with_what_its_host_says(ranks, tmp_path, log, capsys):  # noqa: F811
    pids = [ranks(), ranks()]
    looks = watching(tmp_path)
    assert looks.died() is looks.watchdog.look() is None
    looks._faults = SimpleNamespace(is_out_of_memory=lambda: True, of_gpus=lambda: ["Xid 79"])
    os.kill(pids[0], signal.SIGKILL)
    while read_beats(tmp_path)[0].is_alive:
        time.sleep(0.01)
    incident = looks.died()
    looks.report(incident)
    assert incident.sentence.startswith("rank 0 died in step 5, phase data; the kernel has killed a process for want")
    assert [one.rank for one in incident.held] == [0, 1] and list(incident.driver_faults) == ["Xid 79"]
    assert incidents(tmp_path)[0]["what"] == incident.sentence in capsys.readouterr().err
    assert looks.died() is None, "once"


def test_of_several_hosts_that_of_rank_0_writes_a_stall_down_and_each_its_dead(tmp_path, log, capsys):
    for number in range(2):
        looks = watching(tmp_path, hosts=Hosts("127.0.0.1", 1, "x", 2, number))
        looks.report(beside.Incident("stalled", [3], 5, "data", waited_s=7.0))
        looks.report(beside.Incident("died", [number], 5, "data"))
    assert [(line["cause"], line["ranks"]) for line in incidents(tmp_path)] == [
        ("stalled", [3]),
        ("died", [0]),
        ("died", [1]),
    ]
    assert capsys.readouterr().err.count("rank 3 stalls") == 2


def test_watchdogs_of_a_start_meet_at_the_store_of_its_ranks():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one, other, later = (Hosts("127.0.0.1", store.port, name, 2, 0).connect() for name in ("a", "a", "b"))
    one.set("key", "value")
    assert other.get("key") == b"value" and store.get("windlass/watch/a/key") == b"value"
    assert not later.check(["key"])


RANK = """
import sys, time
from pathlib import Path
from windlass.supervise.beside import Watch, watched_beside
from windlass.supervise.heartbeat import Heartbeat, folder_of

run = Path(sys.argv[1])
with Heartbeat(folder_of(run)) as beat, watched_beside(Watch(str(run), 1000.0, 1000.0)):
    beat.beat("step", 4)
    print(flush=True)
    if sys.stdin.readline() == "fail\\n":
        raise ValueError
"""


def rank_0(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path)], **pipes)
    process.stdout.readline()
    return process


def watchdog_of(process):
    """Its process, once it looks."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (found := children.read_text().split()):
        time.sleep(0.01)
    status = Path(f"/proc/{found[0]}")
    while b"windlass.supervise.beside" not in (status / "cmdline").read_bytes():
        time.sleep(0.01)
    return int(found[0])


def has_looked(pid):
    """Returns once it waits for its input, which it does after a look at all pages that were there when it began. A kernel that
    does not say what a process waits for (0) is given five seconds."""
    end_s, said = time.monotonic() + LIMIT_S, Path(f"/proc/{pid}/wchan").read_text
    while "poll" not in (found := said()):  # what select(2) waits in
        assert time.monotonic() < end_s, found
        if found == "0" and time.monotonic() > end_s - LIMIT_S + 5:
            return
        time.sleep(0.01)


def test_it_ends_with_its_rank_and_names_that_where_it_was_killed(tmp_path):
    process = rank_0(tmp_path)
    pid = watchdog_of(process)
    has_looked(pid)
    process.kill()
    _, said = process.communicate(timeout=LIMIT_S)  # its stderr is closed by the last that has it
    assert said == "windlass: rank 0 died in step 5, phase step\n"
    while process_state(pid) not in ("", "Z"):
        time.sleep(0.01)


def test_a_run_that_ends_well_leaves_nothing_and_signals_of_its_ranks_pass_by(tmp_path):
    process = rank_0(tmp_path)
    pid = watchdog_of(process)
    blocked = int(re.search(r"SigBlk:\t(\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        assert blocked >> (number - 1) & 1
        os.kill(pid, number)
    _, said = process.communicate("\n", timeout=LIMIT_S)
    assert (process.returncode, said) == (0, "") and not Path(f"/proc/{pid}").exists()
    assert read_beats(tmp_path) == []


def test_a_rank_that_fails_because_another_has_died_lets_that_be_named(ranks, tmp_path):  # noqa: F811
    pid = ranks(rank=1)
    process = rank_0(tmp_path)
    has_looked(watchdog_of(process))
    os.kill(pid, signal.SIGKILL)
    while process_state(pid) not in ("", "Z"):
        time.sleep(0.01)
    _, said = process.communicate("fail\n", timeout=LIMIT_S)
    assert said.count("windlass: rank 1 died in step 5, phase data\n") == 1 and "ValueError" in said


def test_a_watchdog_that_ends_by_itself_is_missed(tmp_path, capsys):
    """Killed for want of memory, say: the run goes on, and says that nobody looked."""
    with watched_beside(Watch(str(tmp_path), 1000.0, 1000.0)):
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        os.kill(pid := int(children.read_text().split()[-1]), signal.SIGKILL)
        while process_state(pid) != "Z":
            time.sleep(0.01)
    assert (
        capsys.readouterr().out
        == "windlass: the watchdog of this host ended early, with -9: nobody watched its ranks\n"
    )


def test_what_it_is_given_is_what_it_reads(tmp_path, monkeypatch):
    """By the arguments of the process."""
    watch = Watch(str(tmp_path), 5.0, float("inf"), Hosts("h", 7, "name", 3, 1))
    given = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: given.append(command[-1]) or _process())
    with watched_beside(watch):
        pass
    made = []
    monkeypatch.setattr(beside, "WatchBeside", lambda *found: made.append(found) or SimpleNamespace(run=lambda _: None))
    beside.watch_run(given[0])
    assert made[0][:2] == (watch, os.getpid()) and isinstance(made[0][0].hosts, Hosts)
    beside.watch_run(json.dumps([1, *watch[:3], None]))
    assert made[1][0].hosts is None


def _process():
    return SimpleNamespace(kill=lambda: None, communicate=lambda: None, poll=lambda: None)


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("hangs", [1, 0])
def test_on_two_hosts_the_rank_that_hangs_on_one_is_named(tmp_path, hangs):
    """Ranks are processes that nobody but the watchdogs looks after; those meet at the store of rank 0. Where that hangs itself,
    its host names it, and the other one says that it does not know."""
    lengths = {"run": {"steps": 5000, "tokens_per_step": 64}, "evaluate": {"every_steps": 5000}}
    config = tiny.recipe(tmp_path, checkpoint={"every_steps": 10}, launch={"stall_s": 15.0}, **lengths)
    prepare_only(config)
    (tmp_path / "tiny.yaml").write_text(to_yaml(config))
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "windlass", "train", str(tmp_path / "tiny.yaml")]
    with hosts(2) as found:
        out = [tmp_path / f"{host.name}.txt" for host in found]
        started = [
            host.start(command, file, RANK=str(rank), LOCAL_RANK="0", **world)
            for rank, (host, file) in enumerate(zip(found, out))
        ]
        end_s = time.monotonic() + 3 * LIMIT_S
        while not committed_steps(config.run.directory / "checkpoints"):
            assert time.monotonic() < end_s and started[0].poll() is None, out[0].read_text()
            time.sleep(0.1)
        agent_of(started[hangs]).suspend()
        codes = [process.wait(3 * LIMIT_S) for process in started]
    texts = [file.read_text() for file in out]
    said = [re.findall("^windlass: (rank.*)$", text, re.M) for text in texts]
    named = f"rank {hangs} on host{hangs} stalls in step "
    assert (
        codes[hangs] == 128 + signal.SIGKILL
        and said[hangs][0].startswith(named)
        and "stopped (SIGSTOP)" in said[hangs][0]
    )
    assert [line["what"] for line in incidents(config.run.directory)] == said[hangs][:1], (
        "rank 0's host alone writes it down"
    )
    if hangs:
        assert said[0] == said[1] and codes[0] == 128 + signal.SIGKILL
    else:
        assert said[1] == [] or beside.SILENT in texts[1]
