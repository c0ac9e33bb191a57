"""One start of the ranks: whose failure is the first. Starts themselves: test_local."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from windlass.launch.agent import ERRORS, _death, _failure, _first, start_ranks
from windlass.launch.spawn import Exit, Signalled
from windlass.supervise import host_faults, watchdog
from windlass.supervise.heartbeat import LastBeat, forget_beats
from windlass.supervise.resident import HostMemory
from windlass.supervise.watchdog import Deadlines


@pytest.mark.parametrize(
    ("codes", "rank"),
    [
        ({0: (100, 1), 1: (100, -9)}, 1),  # rank 0 failed by the silence of rank 1
        ({0: (99, 1), 1: (100, -11)}, 0),  # it crashed while it was ended
        ({0: (99, 2), 1: (98, 1)}, 1),
        ({0: (99, 1), 1: (100, -6)}, 0),  # NCCL aborts a rank whose peer is gone
        ({0: (100, -15), 1: (100, 75)}, 1),  # torchelastic ends the others by SIGTERM
        ({0: (100, -15), 1: (100, 1), 2: (100, 1)}, 1),
        ({0: (100, -15), 1: (101, -9)}, 1),
        ({0: (100, -15), 1: (101, 1)}, 1),
    ],
)
def test_the_first_to_fail_is_found(codes, rank):
    failures = {rank: Exit(code, time_s) for rank, (time_s, code) in codes.items()}
    assert _first(failures) == (rank, codes[rank][1])


def test_a_signal_after_an_error_does_not_swallow_it(tmp_path, capsys):
    def run():
        (Path(os.environ[ERRORS]) / "000001").write_text("3\nthe loss is not finite", "utf-8")
        raise Signalled(signal.SIGTERM)

    with pytest.raises(Signalled):
        start_ranks(run, tmp_path, None)
    assert capsys.readouterr().err == "windlass: the loss is not finite\n" and ERRORS not in os.environ


def test_a_dead_rank_is_named_with_what_went_wrong_on_its_host():
    news = "GPU 3 lowers its clocks: power brake"
    assert _death(1, -6, [], False, [news]).sentence == f"rank 1 failed first, with signal SIGABRT; {news}"
    held = [HostMemory(1, 5 << 30, 0, 0, 5 << 30)]
    assert "holding: rank 1 5.0 GiB" in _death(1, -9, [], True, [], held).sentence
    assert _death(1, -9, [], False, [], held).held == ()


def test_a_failure_has_the_step_and_the_batch_of_its_rank():
    beats = [LastBeat(1, 0, 6, 56, 0.0, "step"), LastBeat(2, 1, 6, 48, 0.0, "data"), LastBeat(3, 2, 0, 0, 0.0, "start")]
    incident = _death(1, -9, beats, False)
    assert (incident.step, incident.phase, _failure(137, incident, beats).position) == (6, "data", 48)
    assert [_death(1, code, beats, True).is_out_of_memory for code in (-9, 1, -15)] == [True, False, False]
    early = _death(2, 1, beats, False)
    assert (early.step, _failure(1, early, beats).position) == (None, 0) == (_death(5, 1, beats, False).step, 0)


def test_what_a_host_saw_is_in_the_incident_of_a_start(tmp_path, monkeypatch, capsys):
    """A kill for memory that the kernel counted while ranks ran, and what driver and devices reported."""
    kills = iter([3, 4, 4, 4])
    monkeypatch.setattr(host_faults, "oom_kills", lambda: next(kills))
    faults = ["Xid 79 on GPU 0", "GPU 0 lowers its clocks"]
    monkeypatch.setattr(host_faults.HostFaults, "of_gpus", lambda _: faults)
    of_memory = start_ranks(lambda: {1: Exit(-9, 5.0)}, tmp_path, None).incident
    assert of_memory.is_out_of_memory and list(of_memory.driver_faults) == faults
    other = start_ranks(lambda: {1: Exit(-9, 5.0)}, tmp_path, None).incident
    assert not other.is_out_of_memory, "none was counted"
    assert other.sentence.endswith("; ".join(faults)) and other.sentence in capsys.readouterr().err


def test_a_rank_that_the_kernel_kills_for_memory_is_named_with_what_it_held(tmp_path, monkeypatch):
    """Ranks are looked at while they live; the killed one holds 64 MiB more than the other."""
    kills = iter([0, 1])
    monkeypatch.setattr(host_faults, "oom_kills", lambda: next(kills))
    program = """
import sys, time
from pathlib import Path
from windlass.supervise.heartbeat import Heartbeat, folder_of
held = b"x" * (int(sys.argv[2]) << 26)
with Heartbeat(folder_of(Path(sys.argv[1])), int(sys.argv[2]), is_watched=True) as beat:
    beat.beat("step", 4)
    print(flush=True), time.sleep(600)
"""
    looked = threading.Event()
    original = watchdog.Watchdog._weigh

    def weigh(self, beats):
        original(self, beats)
        if len(self.held) == 2:
            looked.set()

    monkeypatch.setattr(watchdog.Watchdog, "_weigh", weigh)

    def run():
        ranks = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(rank)]) for rank in range(2)]
        assert looked.wait(600)
        for process in ranks:
            process.kill()
            process.wait()
        return {1: Exit(-9, 5.0)}

    incident = start_ranks(run, tmp_path, Deadlines(1000.0)).incident
    forget_beats(tmp_path)
    held = {one.rank: one for one in incident.held}
    assert (incident.ranks, incident.step) == ([1], 4) and held[1].own - held[0].own > 32 << 20
    assert incident.sentence.index("rank 1 ", 10) < incident.sentence.index("rank 0 ")
