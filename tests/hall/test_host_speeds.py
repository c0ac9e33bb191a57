"""What is measured between hosts, and who is called slow."""

import math
import socket
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from windlass import host_speeds
from windlass.errors import UserError
from windlass.host_speeds import HostSpeeds, check_hosts, measure_hosts, rounds
from windlass.runtime import start_runtime

MIB = 2**20


def speeds(pairs, products=None):
    """`pairs`: MiB per second between a and b, b and c, ...; `products`: seconds by host."""
    names = "abcdefg"[: len(pairs)] if len(pairs) > 1 else "ab"
    found = {(names[one], names[(one + 1) % len(names)]): rate * MIB for one, rate in enumerate(pairs)}
    return HostSpeeds(100 * MIB, len(names), found, products or dict.fromkeys(names, 0.01))


@pytest.mark.parametrize("number", range(2, 12))
def test_pairs_of_a_round_share_no_host_and_all_neighbours_meet_once(number):
    leaders = [3 * one for one in range(number)]
    found = rounds(leaders)
    assert len(found) == (1 if number == 2 else 2 + number % 2)
    for together in found:
        assert len({rank for pair in together for rank in pair}) == 2 * len(together)
    expected = {frozenset((leaders[one], leaders[(one + 1) % number])) for one in range(number)}
    assert sorted(map(sorted, expected)) == sorted(sorted(pair) for together in found for pair in together)


def test_a_host_that_is_slow_to_both_neighbours_is_named():
    (said,) = speeds([10, 12, 100, 110]).slow_hosts()
    assert said.startswith("the network of b is slow: 12.0 MiB/s at most, 105.0 MiB/s between the others.")
    (said,) = speeds([100, 10, 20]).slow_hosts()
    assert said.startswith("the network of c is slow: 20.0 MiB/s at most, 100.0 MiB/s between")


def test_one_slow_link_two_hosts_and_small_differences_name_nobody():
    """A link that is slow alone may be either host's; of two hosts there is one link."""
    assert [speeds(found).slow_hosts() for found in ([10, 100, 100, 100], [5], [60, 70, 100, 110])] == [[]] * 3


def test_a_host_that_computes_slowly_is_named():
    (said,) = speeds([100, 100, 100], {"a": 0.01, "b": 0.011, "c": 0.05}).slow_hosts()
    assert said.startswith("c computes 4.8 times slower than the others, and every step waits for it")
    assert speeds([100], {"a": 0.01, "b": 0.019}).slow_hosts() == []


def test_the_sentence_before_step_0():
    assert speeds([50, 100, 200]).describe() == (
        "all-reduce of 3 ranks 100.0 MiB/s, between two hosts 50.0 MiB/s to 200.0 MiB/s"
    )
    assert speeds([50]).describe() == "all-reduce of 2 ranks 100.0 MiB/s, between two hosts 50.0 MiB/s"


class Network:
    """A clock, and `hosts` with a rank each, where every link carries `rate` bytes per second in each direction. A sum of all
    takes the latency of a tree, up and down."""

    def __init__(self, hosts, rate, latency_s=1e-4):
        self.hosts, self.rate, self.latency_s = hosts, rate, latency_s
        self.simulated = self.of_pair = 0.0
        self.runtime = SimpleNamespace(
            hosts=lambda: [str(host) for host in range(hosts)],
            rank=0,
            world=hosts,
            device=torch.device("cpu"),
            tree=SimpleNamespace(barrier=lambda: None),
            gathered=self.gathered,
            max_over_ranks=lambda value: value,
        )

    def all_reduce(self, tensor):
        self.simulated += 2 * (
            math.log2(self.hosts) * self.latency_s + (1 - 1 / self.hosts) * tensor.nbytes / self.rate
        )

    def exchange(self, sends):
        self.of_pair = self.latency_s + sends[0].nbytes / self.rate
        self.simulated += self.of_pair
        return []

    def gathered(self, value):
        """Rank 0's time is everyone's; in a round without it others exchange as long as it did in the one before."""
        self.simulated += 0.0 if value else self.of_pair
        return [value or self.of_pair] * self.hosts


@pytest.mark.parametrize("hosts", [2, 3, 64, 1023, 2048])
@pytest.mark.parametrize("rate", [125e3, 12.5e6, 1.25e9, 50e9])
def test_no_number_of_hosts_and_no_network_takes_ten_seconds(monkeypatch, hosts, rate):
    """From 1 Mbit/s to 400 Gbit/s, by the clock of a simulated network."""
    network = Network(hosts, rate)
    monkeypatch.setattr(host_speeds.time, "perf_counter", lambda: network.simulated)
    monkeypatch.setattr(host_speeds.dist, "all_reduce", network.all_reduce)
    monkeypatch.setattr(host_speeds.dist, "P2POp", lambda _operation, tensor, _rank: tensor)
    monkeypatch.setattr(host_speeds.dist, "batch_isend_irecv", network.exchange)
    found = measure_hosts(network.runtime)
    assert 0 < network.simulated < 10
    assert len(found.pairs) == (1 if hosts == 2 else hosts)
    assert 0.4 * rate < found.summed < 1.001 * rate, "a part of it is latency"


def on_hosts(names):
    """On a rank: what it measures where the ranks' hosts are called `names`."""
    import torch.distributed as dist

    from windlass.runtime import start_runtime

    with mock.patch.object(socket, "gethostname", return_value=names[dist.get_rank()]):
        return measure_hosts(start_runtime())


@pytest.mark.parametrize(
    ("names", "pairs"),
    [
        ("ab", {("a", "b")}),
        ("abc", {("a", "b"), ("b", "c"), ("c", "a")}),
        ("aabb", {("a", "b")}),
        ("abcd", {("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")}),
    ],
)
def test_every_rank_measures_the_same_between_all_neighbours(ranks, names, pairs):
    found = ranks.run(len(names), on_hosts, names)
    assert all(one == found[0] for one in found) and found[0].pairs.keys() == pairs
    assert found[0].ranks == len(names) and set(found[0].products_s) == set(names)
    assert min(found[0].summed, *found[0].pairs.values(), *found[0].products_s.values()) > 0


def test_one_host_measures_nothing(ranks):
    assert ranks.run(2, on_hosts, "aa") == [None, None]


def compare_hosts(streams, ahead_s):
    """On a rank: what is found where each reads its own of `streams`, and its clock is ahead by its own of `ahead_s`."""
    runtime = start_runtime()
    now_s, host = 1e9 + ahead_s[runtime.rank], f"host{runtime.rank}"
    try:
        clock = mock.patch.object(host_speeds, "time", SimpleNamespace(time=lambda: now_s))
        unmeasured = mock.patch.object(host_speeds, "measure_hosts", lambda _: None)
        with clock, unmeasured, mock.patch.object(socket, "gethostname", lambda: host):
            return check_hosts(streams[runtime.rank], runtime)
    except UserError as error:
        return error.given
    finally:
        runtime.close()


def test_hosts_with_other_data_are_refused_and_a_clock_that_differs_is_named(ranks):
    assert ranks.run(2, compare_hosts, ["abc", "abc"], [0, 0.2]) == [[], []]
    refused = "rank 1 on host1 reads the data abd, rank 0 on host0 reads abc"
    assert ranks.run(2, compare_hosts, ["abc", "abd"], [0, 40]) == [refused] * 2
    for ahead_s, words in ((40, "40 s ahead of the others"), (-40, None)):
        (said,), again = ranks.run(2, compare_hosts, ["abc", "abc"], [0, ahead_s])
        assert [said] == again and said.startswith(f"the clock of host{int(ahead_s > 0)} is {words or '40 s ahead of'}")
    (said,), *others = ranks.run(4, compare_hosts, ["abc"] * 4, [0, 0, -40, 0])
    assert others == [[said]] * 3 and said.startswith("the clock of host2 is 40 s behind the others")
