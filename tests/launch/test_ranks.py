"""The pool of ranks that every multi-rank test stands on: what it returns, and how it fails."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from windlass.launch.ranks import RankFailed, Ranks


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


def fail(kind, rank):
    if dist.get_rank() == rank:
        if kind == "raise":
            raise ValueError("planted")
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
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
        ("raise", "ValueError: planted"),
        ("die", "rank 1 of 2 failed:\ndied with exit code -9"),
        ("leave", "SystemExit: 3"),
        ("hang", "rank 1 of 2 did not finish within 1.0 s, at:"),
    ],
)
def test_a_failure_names_its_rank_and_cause_and_the_next_case_works(pool, kind, said):
    with pytest.raises(RankFailed) as caught:
        pool.run(2, fail, kind, 1, timeout_s=1.0 if kind == "hang" else 60.0)
    message = str(caught.value)
    assert said in message and "rank 1 of 2" in message
    if kind == "hang":
        assert "sleep_for_ever" in message, "the stack of the rank that hangs"
    else:
        assert message.startswith("rank 1 of 2 failed"), "the cause stands first"
    assert [result[1] for result in pool.run(2, who, "again")] == [0, 1]


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
