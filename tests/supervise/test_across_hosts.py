"""The watchdogs of several hosts: all see the same stacks, at once, and one that is silent holds none up for ever."""

import socket
import threading
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from windlass.supervise import across_hosts
from windlass.supervise.across_hosts import SharedWatch
from windlass.supervise.heartbeat import LastBeat
from windlass.supervise.rank_stacks import Collective, RankStack


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def stack(rank):
    collectives = (Collective("0", 4 + rank, "gloo:all_reduce", False),)
    return RankStack(
        LastBeat(100 + rank, rank, 3, 7, 1.5, "step"), 2.0, ("a:1 f",), collectives, "stopped (SIGSTOP)", 0.5
    )


def watches(store, hosts, joined=0, **more):
    def of(number):
        current = SimpleNamespace(joined=joined, hosts=hosts, number=number)
        return SharedWatch(store.clone, lambda: current, **more)

    return [of(number) for number in range(hosts)]


def test_all_hosts_see_the_places_of_all(store):
    both = watches(store, 2)
    assert [watch.is_asked() for watch in both] == [False, False]
    found = [None, None]

    def exchange(number, ranks):
        found[number] = both[number].exchange([stack(rank) for rank in ranks])

    first = threading.Thread(target=exchange, args=(0, [0, 3]))
    first.start()
    while not both[1].is_asked():
        pass
    assert first.is_alive(), "it waits for the answer"
    exchange(1, [1, 2])
    first.join(10)
    assert found[0] == found[1] and [one.beat.rank for one in found[0]] == [0, 1, 2, 3]
    here = socket.gethostname()
    assert found[0][2].fields() == {**stack(2).fields(), "host": here} and found[0][2].is_stopped
    assert not watches(store, 2, joined=1)[0].is_asked(), "the next start is another"


def test_a_host_goes_on_only_when_all_have_read(store):
    """The other has answered, and has not read yet."""
    one = watches(store, 2)[0]
    store.set("windlass/stall/0/stacks/1", "[]")
    thread = threading.Thread(target=one.exchange, args=([stack(0)],))
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    store.add("windlass/stall/0/read", 1)
    thread.join(10)
    assert not thread.is_alive()


def test_a_host_that_does_not_answer_is_left_out(store):
    now_s = [0.0]

    def clock():
        now_s[0] += across_hosts.WAIT_S / 3
        return now_s[0]

    one = watches(store, 2, clock=clock)[0]
    assert [found.beat.rank for found in one.exchange([stack(0)])] == [0]


def test_without_a_store_or_a_start_it_sees_its_own_ranks(store):
    def refuse():
        raise RuntimeError("gone")

    lost = SharedWatch(refuse, lambda: SimpleNamespace(joined=0, hosts=2, number=0))
    early = SharedWatch(store.clone, lambda: None)
    for one in (lost, early):
        assert not one.is_asked() and [found.beat.rank for found in one.exchange([stack(0)])] == [0]


def test_a_store_that_is_silent_holds_a_watchdog_up_once_and_is_asked_again_when_it_speaks(monkeypatch):
    """As where its server was stopped: torch's own deadline does not end that."""
    speaks, asked = threading.Event(), []

    def check(keys):
        asked.append(keys)
        speaks.wait()
        return True

    silent = SimpleNamespace(check=check, set=lambda *_: speaks.wait(), set_timeout=lambda _: None)
    watch = SharedWatch(lambda: silent, lambda: SimpleNamespace(joined=0, hosts=2, number=1))
    monkeypatch.setattr(across_hosts, "WAIT_S", 0.05)
    assert not watch.is_silent and not watch.is_asked() and watch.is_silent
    assert [one.beat.rank for one in watch.exchange([stack(1)])] == [1] and len(asked) == 1
    speaks.set()
    watch._asking.join()
    assert not watch.is_silent and watch.is_asked()
