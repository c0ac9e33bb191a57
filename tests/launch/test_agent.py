"""One start of the ranks: whose failure is the first. Starts themselves: test_local."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from windlass.launch import agent
from windlass.launch.agent import ERRORS, _death, _failure, _first, start_ranks
from windlass.launch.spawn import Exit, Signalled
from windlass.supervise.heartbeat import LastBeat
from windlass.supervise.kernel_log import DriverFault


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


def test_a_dead_rank_is_named_with_what_the_driver_wrote_in_the_last_minute(monkeypatch):
    lost, asked = DriverFault(5.0, "Xid", "0000:03:00", 79, ""), []
    cancelled = lost._replace(number=45)

    def read(since_s):
        asked.append(time.monotonic() - since_s)
        return found

    monkeypatch.setattr(agent, "read_faults", read)
    events = SimpleNamespace(read=lambda: [cancelled])
    found = [cancelled, lost, lost]
    assert agent._driver_faults(events) == [lost.sentence]
    found = []
    assert agent._driver_faults(events) == []
    found = None  # a log that this process may not read
    assert agent._driver_faults(events) == [cancelled.sentence]
    assert all(59 < seconds < 70 for seconds in asked)
    news = "GPU 3 lowers its clocks: power brake"
    assert _death(1, -6, [], False, [news]).sentence == f"rank 1 failed first, with signal SIGABRT; {news}"


def test_a_failure_has_the_step_and_the_batch_of_its_rank():
    beats = [LastBeat(1, 0, 6, 56, 0.0, "step"), LastBeat(2, 1, 6, 48, 0.0, "data"), LastBeat(3, 2, 0, 0, 0.0, "start")]
    incident = _death(1, -9, beats, False)
    assert (incident.step, incident.phase, _failure(137, incident, beats).place) == (6, "data", 48)
    assert [_death(1, code, beats, True).is_out_of_memory for code in (-9, 1, -15)] == [True, False, False]
    early = _death(2, 1, beats, False)
    assert (early.step, _failure(1, early, beats).place) == (None, 0) == (_death(5, 1, beats, False).step, 0)


def test_what_a_host_saw_is_in_the_incident_of_a_start(tmp_path, monkeypatch, capsys):
    """A kill for memory that the kernel counted while ranks ran, and what driver and devices reported."""
    kills = iter([3, 4, 4, 4])
    monkeypatch.setattr(agent, "oom_kills", lambda: next(kills))
    monkeypatch.setattr(agent, "_driver_faults", lambda _xids: ["Xid 79 on GPU 0"])
    monkeypatch.setattr(agent, "new_faults", lambda _before, _now: ["GPU 0 lowers its clocks"])
    of_memory = start_ranks(lambda: {1: Exit(-9, 5.0)}, tmp_path, None).incident
    faults = ["Xid 79 on GPU 0", "GPU 0 lowers its clocks"]
    assert of_memory.is_out_of_memory and list(of_memory.driver_faults) == faults
    other = start_ranks(lambda: {1: Exit(-9, 5.0)}, tmp_path, None).incident
    assert not other.is_out_of_memory, "none was counted"
    assert other.sentence.endswith("; ".join(faults)) and other.sentence in capsys.readouterr().err
