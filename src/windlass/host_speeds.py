"""How fast the hosts of a run reach each other and compute, measured before step 0, so that a slow one has a name.

All ranks sum a tensor: that is as fast as the slowest link. Then neighbouring hosts exchange bytes in pairs, each host with the
one before and the one behind it: a host that is slow to both is slow itself. Every rank multiplies a matrix.

**Time.** The first sum is of 64 KiB. Each next one is four times as large, up to 64 MiB, until another would take more than half
a second: of a small sum most is latency, so its speed says little of a large one's. The pairs exchange as much as the last sum,
and those that share no host measure at once, so the number of hosts hardly counts. By the clock of a simulated network it takes
less than ten seconds with 2 to 2,048 hosts and 1 Mbit/s to 400 Gbit/s (tests/hall/test_host_speeds.py).

Whether the hosts read the same data, and whether their clocks agree, is asked with it (`check_hosts`).
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from windlass.errors import UserError
from windlass.runtime import Runtime
from windlass.units import format_bytes

FIRST_BYTES: Final = 64 * 2**10
MOST_BYTES: Final = 64 * 2**20
TAKES_S: Final = 0.5
GROWTH: Final = 4  # of a sum over the one before
SLOW: Final = 2.0  # times slower than the others: less is what a neighbour on a switch costs
ROWS: Final = 512  # of the matrix that each rank multiplies
REPEATS: Final = 5
CLOCKS_S: Final = 1.0
Pair = tuple[str, str]


@dataclass(frozen=True)
class HostSpeeds:
    summed: float
    """Bytes per second that each rank sends in an all-reduce of all ranks: 2 (n - 1) / n of the tensor."""
    ranks: int
    pairs: Mapping[Pair, float]
    """Neighbouring hosts -> bytes per second in each direction."""
    products_s: Mapping[str, float]
    """Host -> seconds of one product on its slowest rank."""

    def describe(self) -> str:
        slowest, fastest = min(self.pairs.values()), max(self.pairs.values())
        between = _rate(slowest) if len(self.pairs) == 1 else f"{_rate(slowest)} to {_rate(fastest)}"
        return f"all-reduce of {self.ranks} ranks {_rate(self.summed)}, between two hosts {between}"

    def slow_hosts(self) -> list[str]:
        """Sentences on hosts that reach both neighbours, or compute, less than half as fast as the others do; with two hosts
        neither can be called the slow one of a link."""
        found = []
        for host in self.products_s:
            own = [rate for pair, rate in self.pairs.items() if host in pair]
            others = [rate for pair, rate in self.pairs.items() if host not in pair]
            if len(own) == 2 and others and max(own) * SLOW < statistics.median(others):
                found.append(
                    f"the network of {host} is slow: {_rate(max(own))} at most, {_rate(statistics.median(others))} between the "
                    "others. Every collective waits for it: look at its cable, its interface (GLOO_SOCKET_IFNAME, "
                    "NCCL_SOCKET_IFNAME), and who else sends there"
                )
            rest = [seconds for other, seconds in self.products_s.items() if other != host]
            if rest and self.products_s[host] > SLOW * statistics.median(rest):
                found.append(
                    f"{host} computes {self.products_s[host] / statistics.median(rest):.1f} times slower than the others, and "
                    "every step waits for it: look for another process there, a clock that is held down, or fewer threads"
                )
        return found


def check_hosts(stream: str, runtime: Runtime) -> list[str]:
    """Sentences on hosts whose clock differs by more than CLOCKS_S from the middle one of all ranks, on how fast hosts reach each
    other, and on slow ones. Raises UserError, on all ranks alike, where a rank reads other data than rank 0 (`stream`:
    Prepared.stream). Collective."""
    if runtime.world == 1:
        return []
    hosts = runtime.hosts()  # all leave this together; what they read next is read within milliseconds
    facts = runtime.gathered((stream, time.time()))
    other = next((rank for rank, (found, _) in enumerate(facts) if found != facts[0][0]), None)
    if other is not None:
        raise UserError(
            f"rank {other} on {hosts[other]} reads the data {facts[other][0]}, rank 0 on {hosts[0]} reads {facts[0][0]}",
            "all ranks of a run read the same prepared data",
            "set data.directory to a path on storage that every host mounts, or copy the same data to each",
        )
    middle_s = statistics.median_low(now_s for _, now_s in facts)
    off_s = {host: now_s - middle_s for host, (_, now_s) in zip(hosts, facts) if abs(now_s - middle_s) > CLOCKS_S}
    clocks = [
        f"the clock of {host} is {abs(one):.0f} s {'ahead of' if one > 0 else 'behind'} the others: times of events.jsonl are "
        "wrong by as much, and hosts whose clocks differ by 30 s take each other for dead; set it by NTP"
        for host, one in off_s.items()
    ]
    speeds = measure_hosts(runtime)
    return clocks if speeds is None else [*clocks, speeds.describe(), *speeds.slow_hosts()]


def measure_hosts(runtime: Runtime) -> HostSpeeds | None:
    """None on one host. Collective."""
    hosts = runtime.hosts()
    leaders = [rank for rank, host in enumerate(hosts) if hosts.index(host) == rank]
    if len(leaders) == 1:
        return None
    _sum(runtime, FIRST_BYTES)  # connects
    size, took_s = FIRST_BYTES, _sum(runtime, FIRST_BYTES)
    while took_s * GROWTH < TAKES_S and size < MOST_BYTES:
        size *= GROWTH
        took_s = _sum(runtime, size)
    summed = 2 * (runtime.world - 1) / runtime.world * size / took_s
    pairs: dict[Pair, float] = {}
    for together in rounds(leaders):
        runtime.tree.barrier()
        other = next((a + b - runtime.rank for a, b in together if runtime.rank in (a, b)), None)
        took_s = 0.0 if other is None else _exchange(runtime, other, size)
        all_s = runtime.gathered(took_s)
        pairs |= {(hosts[a], hosts[b]): size / max(all_s[a], all_s[b]) for a, b in together}
    products_s: dict[str, float] = {}
    for host, seconds in zip(hosts, runtime.gathered(_multiply(runtime.device)), strict=True):
        products_s[host] = max(seconds, products_s.get(host, 0.0))
    return HostSpeeds(summed, runtime.world, pairs, products_s)


def rounds(leaders: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Neighbours on a ring, in groups of pairs that share nobody: two groups, and a third where their number is odd."""
    number = len(leaders)
    if number == 2:
        return [[(leaders[0], leaders[1])]]
    pairs = [(leaders[one], leaders[(one + 1) % number]) for one in range(number)]
    if number % 2 == 0:
        return [pairs[0::2], pairs[1::2]]
    return [pairs[0:-1:2], pairs[1:-1:2], pairs[-1:]]


def _sum(runtime: Runtime, size: int) -> float:
    """Seconds, of the slowest rank."""
    tensor = torch.zeros(size // 4, device=runtime.device)
    runtime.tree.barrier()
    begun_s = time.perf_counter()
    dist.all_reduce(tensor)
    _finish(runtime.device)
    return runtime.max_over_ranks(time.perf_counter() - begun_s)


def _exchange(runtime: Runtime, other: int, size: int) -> float:
    mine, theirs = (torch.zeros(size // 4, device=runtime.device) for _ in range(2))
    begun_s = 0.0
    for part in (slice(0, FIRST_BYTES // 4), slice(None)):  # the first connects
        begun_s = time.perf_counter()
        sends = [dist.P2POp(dist.isend, mine[part], other), dist.P2POp(dist.irecv, theirs[part], other)]
        for work in dist.batch_isend_irecv(sends):
            work.wait()
        _finish(runtime.device)
    return time.perf_counter() - begun_s


def _multiply(device: torch.device) -> float:
    """The least of a few, since a machine is never less busy than it is."""
    matrix, found = torch.ones(ROWS, ROWS, device=device), []
    for _ in range(REPEATS):
        begun_s = time.perf_counter()
        matrix @ matrix
        _finish(device)
        found.append(time.perf_counter() - begun_s)
    return min(found)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(round(bytes_per_s))}/s"
