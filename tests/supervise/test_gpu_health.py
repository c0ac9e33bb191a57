"""What NVML says of GPUs that is new. No GPU is here: NVML's library is asked, with planted answers."""

from pathlib import Path

import pytest

from tests.doctor.test_gpus import nvml, refuse
from windlass.supervise.gpu_health import GpuHealth, new_faults, read_all

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
