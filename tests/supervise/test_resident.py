"""Host memory of ranks: read of a process that lives, of lines as the kernel writes them, and of none."""

import os

from windlass.supervise.resident import HostMemory, held_by_process, holders, oom_kills


def test_a_process_that_lives_holds_memory_and_one_that_has_ended_none(tmp_path):
    taken = bytearray(os.urandom(1 << 10) * (64 << 10))
    before = held_by_process(3, os.getpid())
    assert before.rank == 3 and before.own >= len(taken) and before.peak >= before.total > before.own
    assert held_by_process(0, 1 << 22) is None
    status = tmp_path / "proc/7/status"
    status.parent.mkdir(parents=True)
    status.write_text("Name:\tp (VmHWM: 9 kB)\nVmHWM:\t  40 kB\nRssAnon:\t 16 kB\nRssFile:\t 8 kB\nRssShmem:\t 4 kB\n")
    assert held_by_process(0, 7, tmp_path) == HostMemory(0, 16 << 10, 4 << 10, 8 << 10, 40 << 10)
    status.write_text("Name:\tpython\nState:\tZ (zombie)\n")
    assert held_by_process(0, 7, tmp_path) is None


def test_three_of_many_are_named_the_largest_first():
    said = holders([HostMemory(rank, rank << 30, 0, 0, rank << 30) for rank in range(5)])
    assert [said.index(f"rank {rank} ") for rank in (4, 3, 2)] == sorted(
        said.index(f"rank {rank} ") for rank in (4, 3, 2)
    )
    assert "rank 1 " not in said and ", and 2 more; a rank less on this host frees about 4.0 GiB" in said
    assert holders([]) == ""


def test_a_kill_for_want_of_memory_is_counted_where_the_kernel_counts_it(tmp_path):
    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert oom_kills(tmp_path) == 0
    write("proc/vmstat", "nr_free_pages 5\noom_kill 2\noom_kill_other 9\n")
    assert oom_kills(tmp_path) == 2
    write("proc/self/cgroup", "1:cpu:/old\n0::/slurm/job_7\n")
    write("sys/fs/cgroup/memory.events", "oom 4\noom_kill 3\n")
    assert oom_kills(tmp_path) == 3
    write("sys/fs/cgroup/slurm/job_7/memory.events", "low 0\noom 9\noom_kill 1\noom_group_kill 0\n")
    assert oom_kills(tmp_path) == 1
