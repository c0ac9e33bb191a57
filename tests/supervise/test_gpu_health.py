"""What NVML says of GPUs that is new. No GPU is here: NVML's library is asked, with planted answers."""

from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from tests.doctor.test_gpus import nvml, refuse
from windlass.supervise.gpu_health import GpuHealth, XidEvents, new_faults, read_all

WELL = GpuHealth(0, (False, False))


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (WELL, WELL, []),
        (WELL, None, ["GPU 1 does not answer any more"]),
        (None, WELL, []),
        (None, None, []),
        (GpuHealth(2), GpuHealth(3), ["GPU 1 has 1 more memory error that ECC could not correct"]),
        (GpuHealth(), GpuHealth(4), ["GPU 1 has 4 more memory errors that ECC could not correct"]),
        (GpuHealth(4), GpuHealth(), []),  # of a lost GPU one answer may fail before the others
        (GpuHealth(4), GpuHealth(4), []),
        (WELL, GpuHealth(0, (True, False)), ["GPU 1: a row of memory waits to be replaced"]),
        (GpuHealth(0, (True, False)), GpuHealth(0, (True, True)), ["GPU 1: replacing a row of memory failed"]),
        (
            WELL,
            GpuHealth(slowed=("power brake", "too hot (driver)")),
            ["GPU 1 lowers its clocks: power brake, too hot (driver)"],
        ),
        (GpuHealth(slowed=("power brake",)), GpuHealth(slowed=("power brake",)), []),
    ],
)
def test_what_is_new_is_said_and_no_more(before, now, said):
    assert new_faults([WELL, before], [WELL, now]) == said


def test_a_driver_that_answers_no_more_loses_every_gpu():
    assert new_faults([WELL, WELL], []) == ["GPU 0 does not answer any more", "GPU 1 does not answer any more"]
    assert new_faults([], []) == []


def test_a_lost_gpu_and_a_silent_driver_are_read_without_an_error():
    def handle(index):
        return index if index != 1 else refuse()

    found = read_all(Path("/dev/null"), three(handle))
    assert found == [GpuHealth(3), None, GpuHealth(3)]
    assert read_all(Path("/dev/null"), nvml(nvmlInit=refuse)) == []
    assert read_all(Path("/dev/no-such-device")) == []


def three(handle):
    return nvml(
        nvmlInit=None,
        nvmlShutdown=None,
        nvmlDeviceGetCount=3,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetTotalEccErrors=3,
    )


class Events:
    """NVML's queue of events, whose GPUs 0 and 2 can register; GPU 1 is lost."""

    def __init__(self, *numbers):
        self.waiting = [SimpleNamespace(device=2, eventData=number) for number in numbers]
        self.registered = []

    def library(self):
        return nvml(
            nvmlInit=None,
            nvmlShutdown=None,
            nvmlDeviceGetCount=3,
            nvmlDeviceGetHandleByIndex=lambda index: index if index != 1 else refuse(),
            nvmlDeviceGetPciInfo=lambda gpu: SimpleNamespace(busId=f"0000000{gpu}:03:00.0".encode()),
            nvmlEventSetCreate="events",
            nvmlEventSetFree=None,
            nvmlDeviceRegisterEvents=lambda *arguments: self.registered.append(arguments),
            nvmlEventSetWait_v2=lambda _events, _timeout: self.waiting.pop(0) if self.waiting else timeout(),
        )


def timeout():
    raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)


def test_xids_are_read_from_nvml_once():
    events = Events(79, 45)
    xids = XidEvents(Path("/dev/null"), events.library())
    assert events.registered == [(gpu, pynvml.nvmlEventTypeXidCriticalError, "events") for gpu in (0, 2)]
    first, second = xids.read()
    assert first.sentence == "Xid 79 at 00000002:03:00.0 (the GPU is gone from the PCIe bus)" and second.is_of_program
    assert xids.read() == []
    xids.close()


@pytest.mark.parametrize("library", [nvml(nvmlInit=refuse), nvml(nvmlInit=None, nvmlEventSetCreate=refuse)])
def test_without_events_there_are_no_xids(library):
    for xids in (XidEvents(Path("/dev/null"), library), XidEvents(Path("/dev/no-such-device"))):
        assert xids.read() == []
        xids.close()
