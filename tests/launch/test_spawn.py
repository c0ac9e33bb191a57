"""The processes of one host's ranks, by ranks of a line or two. Whole launches: test_local and tests/cli."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from windlass.launch import spawn
from windlass.launch.spawn import Exit, Signalled, run_ranks

BEGIN = "import os, pathlib, signal, sys, time; rank = int(os.environ['RANK']); here = pathlib.Path(sys.argv[1]); "
STAYS = "(here / f'up-{rank}').touch(); time.sleep(600)"
PATIENCE_S = 600.0


def ranks(line, place):
    """The command of ranks that run `line`."""
    return [sys.executable, "-c", BEGIN + line, str(place)]


class Received(list):
    """A signal that comes once ranks 0 and 1 are up."""

    def __init__(self, number, place):
        super().__init__([number])
        self.place = place

    def __bool__(self):
        return all((self.place / f"up-{rank}").exists() for rank in range(2))


def assert_gone(place):
    """No rank that wrote down its process id is left."""
    for file in place.glob("pid-*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_each_rank_knows_its_number_and_where_all_meet_and_leads_a_session(tmp_path):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    line = f"import json; found = [os.environ[name] for name in {names}]; (here / f'{{rank}}').write_text(json.dumps(found)); "
    line += "sys.exit(os.getsid(0) != os.getpid() or any(name.startswith('TORCHELASTIC') for name in os.environ))"
    assert run_ranks(ranks(line, tmp_path), 3, [], PATIENCE_S) == {}
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    port = found[0][-1]
    assert found == [[str(rank), str(rank), "3", "3", "127.0.0.1", port] for rank in range(3)] and 0 < int(port) < 65536


def is_over(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # whoever adopted it has not looked yet
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("last", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(7)"])
def test_what_a_rank_has_started_ends_with_it(tmp_path, monkeypatch, last):
    """Rank 1 is killed, or fails; rank 0 has to be killed after that."""
    monkeypatch.setattr(spawn, "GRACE_S", 0.2)
    line = (
        "import subprocess; child = subprocess.Popen(['sleep', '600']); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    )
    line += "own = here / f'child-{rank}'; draft = own.with_suffix('.x'); draft.write_text(str(child.pid)); draft.rename(own)\n"
    line += "while rank == 1 and not (here / 'child-0').exists(): time.sleep(0.01)\n"
    line += f"{last} if rank else time.sleep(600)"
    run_ranks(ranks(line, tmp_path), 2, [], PATIENCE_S)
    pids = [int(file.read_text()) for file in tmp_path.glob("child-?")]
    while not all(map(is_over, pids)):
        time.sleep(0.01)
    assert len(pids) == 2


def test_a_failure_ends_the_others_and_comes_first(tmp_path):
    """Rank 1 fails once the others handle SIGTERM, by which these end with codes of their own."""
    line = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(10 + rank)); up = lambda n: (here / f'up-{n}').exists()\n"
    line += "while rank == 1 and not (up(0) and up(2)): time.sleep(0.01)\n"
    line += f"if rank == 1: sys.exit(7)\n{STAYS}"
    failed = run_ranks(ranks(line, tmp_path), 3, [], PATIENCE_S)
    assert {rank: one.exitcode for rank, one in failed.items()} == {0: 10, 1: 7, 2: 12}
    assert min(failed, key=lambda rank: failed[rank].timestamp) == 1 and time.monotonic() >= failed[0].timestamp


def test_one_that_does_not_end_after_a_failure_is_killed_and_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(spawn, "GRACE_S", 0.0)
    line = "(here / f'pid-{rank}').write_text(str(os.getpid())); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    line += f"while rank == 1 and not (here / 'up-0').exists(): time.sleep(0.01)\nif rank == 1: sys.exit(7)\n{STAYS}"
    failed = run_ranks(ranks(line, tmp_path), 2, [], PATIENCE_S)
    assert {rank: one.exitcode for rank, one in failed.items()} == {1: 7}
    assert_gone(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_is_handed_on_once_and_its_end_is_waited_for(tmp_path, number):
    line = "heard = []\nfor one in (1, 2, 10, 15): signal.signal(one, lambda number, _: heard.append(number))\n"
    line += "(here / f'up-{rank}').touch()\nwhile not heard: time.sleep(0.01)\n"
    line += "time.sleep(0.1)\n(here / f'heard-{rank}').write_text(str(heard))\nsys.exit(75)"
    with pytest.raises(Signalled) as caught:
        run_ranks(ranks(line, tmp_path), 2, Received(number, tmp_path), PATIENCE_S)
    assert caught.value.number == number
    assert [(tmp_path / f"heard-{rank}").read_text() for rank in range(2)] == [f"[{int(number)}]"] * 2


def test_after_a_signal_patience_ends_too(tmp_path):
    line = f"(here / f'pid-{{rank}}').write_text(str(os.getpid())); signal.signal(15, signal.SIG_IGN)\n{STAYS}"
    with pytest.raises(Signalled):
        run_ranks(ranks(line, tmp_path), 2, Received(signal.SIGTERM, tmp_path), 0.0)
    assert len([*tmp_path.glob("pid-*")]) == 2
    assert_gone(tmp_path)


def test_after_a_signal_none_is_started(tmp_path):
    with pytest.raises(Signalled) as caught:
        run_ranks(ranks(STAYS, tmp_path), 2, [signal.SIGHUP, signal.SIGTERM], PATIENCE_S)
    assert caught.value.number == signal.SIGHUP and not any(tmp_path.iterdir())


def test_a_rank_that_cannot_be_started_leaves_no_other(tmp_path, monkeypatch):
    begun = []

    class Full(subprocess.Popen):
        def __init__(self, *given, **named):
            if begun:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            super().__init__(*given, **named)
            begun.append(self)

    monkeypatch.setattr(subprocess, "Popen", Full)
    with pytest.raises(BlockingIOError):
        run_ranks(ranks(STAYS, tmp_path), 2, [], PATIENCE_S)
    assert begun[0].returncode == -signal.SIGKILL


def test_a_killed_rank_has_minus_the_signals_number():
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    (one,) = run_ranks(command, 1, [], PATIENCE_S).values()
    assert isinstance(one, Exit) and one.exitcode == -9
