"""Shared memory, limits and the environment of a host."""

import pytest

from windlass.doctor.host import HostLimits, check_environment, check_limits, check_load, read_limits
from windlass.units import GIB

GOOD = HostLimits(shared=64 * GIB, files=1_048_576, locked=-1, processes=-1)


def names(found):
    return [one.name for one in found]


def test_a_good_host_has_no_findings_and_this_one_can_be_read():
    assert names(check_limits(GOOD, 8, True, hosts=2)) == []
    assert read_limits().files != 0


@pytest.mark.parametrize(
    ("changes", "ranks", "infiniband", "hosts", "found"),
    [
        ({"shared": 8 * GIB - 1}, 8, False, 1, ["shared-memory-small"]),
        ({"shared": 8 * GIB}, 8, False, 1, []),
        ({"shared": 64 << 20}, 1, False, 1, []),  # one rank shares with nobody
        ({"shared": None}, 8, False, 1, []),
        ({"files": 1024}, 8, False, 2, ["few-open-files"]),
        ({"files": 1024}, 8, False, 1, []),
        ({"files": -1}, 8, False, 2, []),
        ({"locked": 65_536}, 8, True, 1, ["locked-memory"]),
        ({"locked": 65_536}, 8, False, 1, []),
        ({"processes": 4096}, 8, False, 1, ["few-processes"]),
        ({"processes": 8192}, 8, False, 1, []),
    ],
)
def test_limits(changes, ranks, infiniband, hosts, found):
    assert names(check_limits(GOOD._replace(**changes), ranks, infiniband, hosts)) == found


@pytest.mark.parametrize(
    ("environ", "ranks", "found", "said"),
    [
        ({}, 8, [], ""),
        (
            {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "1"},
            1,
            ["slow-environment"],
            "unset CUDA_LAUNCH_BLOCKING NCCL_P2P",
        ),
        ({"CUDA_LAUNCH_BLOCKING": "0", "NCCL_DEBUG": "INFO"}, 1, [], ""),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, 1, ["slow-environment"], "unset TORCH_DISTRIBUTED_DEBUG"),
        ({"OMP_NUM_THREADS": "5"}, 8, ["too-many-threads"], "OMP_NUM_THREADS=4"),
        ({"OMP_NUM_THREADS": "4"}, 8, [], ""),
        ({"OMP_NUM_THREADS": "64"}, 1, [], ""),
        (
            {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "2"},
            1,
            ["restarts-fail"],
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        ),
        (
            {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0", "GROUP_WORLD_SIZE": "2"},
            1,
            [],
            "",
        ),
    ],
)
def test_environment(environ, ranks, found, said):
    seen = list(check_environment(environ, ranks, cores=32))
    assert names(seen) == found and all(said in one.fix for one in seen)


@pytest.mark.parametrize(
    ("load", "cores", "threads", "found"),
    [
        (2.1, 2, {}, ["busy-cores"]),
        (2.1, 2, {"OMP_NUM_THREADS": "2"}, ["busy-cores"]),
        (2.1, 2, {"OMP_NUM_THREADS": "1"}, []),  # one thread waits for no other
        (2.0, 2, {}, []),
        (5.0, 1, {}, []),  # a rank has one thread there
        (None, 2, {}, []),
    ],
)
def test_load(load, cores, threads, found):
    seen = list(check_load(load, cores, threads))
    assert names(seen) == found and all("OMP_NUM_THREADS=1" in one.fix for one in seen)
