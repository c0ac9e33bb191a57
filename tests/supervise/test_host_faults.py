"""What a host says went wrong since ranks were started: counted by fakes of the kernel and of NVML."""

from types import SimpleNamespace

from windlass.supervise import host_faults
from windlass.supervise.host_faults import FAULTS_S, HostFaults
from windlass.supervise.kernel_log import DriverFault


class Events:
    """Of NVML: one Xid."""

    is_closed = False

    def read(self):
        return [DriverFault(0.0, "Xid", "0000:03:00", 45, "")]

    def close(self):
        Events.is_closed = True


def test_faults_are_those_of_the_last_minute_and_what_is_new_of_the_gpus(monkeypatch):
    lost, asked = DriverFault(5.0, "Xid", "0000:03:00", 79, ""), []
    (cancelled,) = Events().read()

    def read(since_s):
        asked.append(since_s)
        return found

    monkeypatch.setattr(host_faults, "read_faults", read)
    monkeypatch.setattr(host_faults, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    monkeypatch.setattr(host_faults, "XidEvents", Events)
    health = iter(["before", "now", "now", "now"])
    monkeypatch.setattr(host_faults, "read_all", lambda: next(health))
    monkeypatch.setattr(host_faults, "new_faults", lambda *pair: [f"{' '.join(pair)}: slower"])
    with HostFaults() as faults:
        found = [cancelled, lost, lost]
        assert faults.of_gpus() == [lost.sentence, "before now: slower"]
        found = []
        assert faults.of_gpus() == ["before now: slower"]
        found = None  # a log that this process may not read
        assert faults.of_gpus() == [cancelled.sentence, "before now: slower"]
        assert asked == [1000.0 - FAULTS_S] * 3 and not Events.is_closed
    assert Events.is_closed


def test_a_kill_for_want_of_memory_is_one_since_the_start(monkeypatch):
    kills = [3]
    monkeypatch.setattr(host_faults, "oom_kills", lambda: kills[0])
    with HostFaults() as faults:
        assert not faults.is_out_of_memory()
        kills[0] = 4
        assert faults.is_out_of_memory()
