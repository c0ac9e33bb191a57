"""What a host has left, read from files of the kernel."""

import pytest

from windlass.training.sizing.host_memory import available_bytes

MEMINFO = "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:    8000 kB\nHugePages_Total:       0\n"
HOST = 8_192_000
JOB = "system.slice/slurmstepd.scope/job_7/step_0"


def put(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def limited(folder, limit, current="3000000\n"):
    stat = "anon 1900000\ninactive_file 1000000\nactive_file 100000\n"
    put(folder, memory__max=limit, memory__current=current, memory__stat=stat)


@pytest.fixture
def host(tmp_path):
    put(tmp_path / "proc/self", cgroup="0::/\n")
    put(tmp_path / "proc", meminfo=MEMINFO)
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "left"), [("max\n", HOST), ("4000000\n", 2_000_000), ("900000000\n", HOST), ("100\n", 0)]
)
def test_the_lesser_of_the_kernels_word_and_the_containers_limit(host, limit, left):
    assert available_bytes(host) == HOST
    limited(host / "sys/fs/cgroup", limit)
    assert available_bytes(host) == left


@pytest.mark.parametrize("at", [JOB, "system.slice/slurmstepd.scope/job_7"])
def test_the_limit_of_a_job_is_that_of_its_group_or_of_one_around_it(host, at):
    put(host / "proc/self", cgroup=f"0::/{JOB}\n")
    limited(host / "sys/fs/cgroup", "max\n")
    limited(host / "sys/fs/cgroup" / at, "2500000\n")
    assert available_bytes(host) == 500_000


def test_the_first_version_of_control_groups_limits_too(host):
    put(host / "proc/self", cgroup="12:cpu,cpuacct:/job_7\n5:memory:/slurm/job_7\n1:name=systemd:/\n0::/\n")
    put(
        host / "sys/fs/cgroup/memory/slurm",
        memory__limit_in_bytes="5000000\n",
        memory__usage_in_bytes="3000000\n",
        memory__stat="total_inactive_file 500000\n",
    )
    assert available_bytes(host) == 2_500_000


@pytest.mark.parametrize("meminfo", ["", "MemTotal: 16000 kB\n", "MemAvailable: much\n"])
def test_where_the_kernel_does_not_say_it_is_not_known(host, meminfo):
    put(host / "proc", meminfo=meminfo)
    assert available_bytes(host) is None and available_bytes(host / "absent") is None
