"""The pool of ranks that every multi-rank test is built on: what it returns, and how it fails."""

import os
import re
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from windlass.proof.pool import RankFailed, Ranks


@pytest.fixture(scope="module")
def pool():
    """A pool of its own, since the cases here kill it."""
    pool = Ranks()
    yield pool
    pool.close()


def who(tag):
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return tag, dist.get_rank(), dist.get_world_size(), total.item(), os.getpid()


def test_each_case_gets_a_group_of_its_own_size_on_the_same_processes(pool):
    processes = {}
    for world in (2, 4, 1, 3):
        results = pool.run(world, who, "x")
        assert [result[:4] for result in results] == [("x", rank, world, sum(range(world))) for rank in range(world)]
        for _, rank, *_, pid in results:
            assert processes.setdefault(rank, pid) == pid


def spoil():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    dist.new_group([0])


def look():
    return torch.get_default_dtype(), torch.initial_seed(), torch.get_num_threads()


def test_nothing_leaks_into_the_next_case(pool):
    pool.run(2, spoil)
    assert pool.run(2, look) == [(torch.float32, 0, 1)] * 2


def gather_along_the_first_axis(groups_before):
    """-> each rank of the own group, doubled. `groups_before` groups made first give the groups of an equal mesh other names."""
    for _ in range(groups_before):
        dist.new_group([0])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["a"]
    mine = DTensor.from_local(torch.tensor([float(dist.get_rank())]), mesh, [Shard(0)])
    return (mine * 2).full_tensor().tolist()


def test_an_equal_mesh_of_the_next_case_sends_through_its_own_groups(pool):
    for groups_before in (0, 2, 0):
        results = pool.run(4, gather_along_the_first_axis, groups_before)
        assert results == [[0.0, 4.0], [2.0, 6.0]] * 2


def fail(kind, rank):
    if dist.get_rank() == rank:
        if kind == "raise":
            raise ValueError("planted")
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "leave":
            raise SystemExit(3)
        while kind == "hang":
            sleep_for_ever()
    dist.barrier()


def sleep_for_ever():
    time.sleep(1000)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("raise", "rank 1 of 2 failed first: ValueError: planted\n"),
        ("die", "rank 1 of 2 failed first: died with exit code -9"),
        ("crash", "died with exit code -11\nFatal Python error: Segmentation fault"),
        ("leave", "SystemExit: 3"),
        ("hang", "rank 1 of 2 did not finish within 5.0 s, at:"),
    ],
)
def test_a_failure_names_its_rank_and_cause_and_the_next_case_works(pool, kind, said):
    with pytest.raises(RankFailed) as caught, warnings.catch_warnings(action="ignore" if kind == "crash" else "error"):
        pool.run(2, fail, kind, 1, timeout_s=5.0 if kind == "hang" else 60.0)
    message = str(caught.value)
    assert said in message and "rank 1 of 2" in message
    if kind == "crash":
        assert re.search(r'test_pool.py", line \d+ in fail\n', message), "the stack of the rank that crashed"
    if kind == "hang":
        assert "sleep_for_ever" in message, "the stack of the rank that hangs"
    else:
        assert message.startswith("rank 1 of 2 failed"), "the cause comes first"
    assert [result[1] for result in pool.run(2, who, "again")] == [0, 1]


def crash(number, times, directory):
    """Rank 1 dies of the signal `number` in the first `times` runs -> runs before this one."""
    runs = Path(directory, f"runs-{dist.get_rank()}")
    before = len(runs.read_text()) if runs.exists() else 0
    runs.write_text("x" * (before + 1))
    dist.barrier()
    if dist.get_rank() == 1 and before < times:
        os.kill(os.getpid(), number)
    dist.barrier()
    return before


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT])
def test_a_rank_that_dies_in_a_library_is_printed_and_its_case_runs_once_more(pool, tmp_path, number):
    said = f"the case runs once more, on new ranks: rank 1 of 2 failed first: died with exit code -{number:d}"
    with pytest.warns(UserWarning, match=said):
        assert pool.run(2, crash, number, 1, str(tmp_path)) == [1, 1]


def test_the_second_crash_of_a_case_fails_it(pool, tmp_path):
    with pytest.warns(UserWarning), pytest.raises(RankFailed, match="Segmentation fault"):
        pool.run(2, crash, signal.SIGSEGV, 2, str(tmp_path))
    assert Path(tmp_path, "runs-1").read_text() == "xx"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_somebody_ends_fails_its_case_at_once(pool, tmp_path, number):
    with pytest.raises(RankFailed, match=f"died with exit code -{number:d}"), warnings.catch_warnings(action="error"):
        pool.run(2, crash, number, 1, str(tmp_path))
    assert Path(tmp_path, "runs-1").read_text() == "x"


def lay_out():
    """As a layout does: a tensor over one axis of a mesh, gathered over both, whose mesh is in a cycle."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    cut = DTensor.from_local(torch.ones(3), mesh["tp"], [Shard(0)]).redistribute(placements=[Replicate()])
    both = DTensor.from_local(torch.ones(3), mesh, [Shard(0), Shard(0)]).full_tensor()
    held = [mesh, cut, both]
    held.append(held)


def kept():
    """Threads and files of this rank with one layout of its own. All threads: a new one does not have its name at once."""
    lay_out()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads where Linux lists them")
def test_a_case_leaves_no_group_behind(pool):
    """Each would look for news every 10 ms, and a rank serves hundreds of cases."""
    first = pool.run(4, kept)
    for _ in range(3):
        last = pool.run(4, kept)
    assert first == last


@pytest.mark.parametrize("world", [0, 17])
def test_a_world_out_of_range_is_refused(pool, world):
    with pytest.raises(ValueError, match=f"world {world} is outside 1..16"):
        pool.run(world, who, "x")


def test_closing_ends_every_process():
    pool = Ranks()
    pids = [result[4] for result in pool.run(2, who, "x")]
    pool.close()
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
