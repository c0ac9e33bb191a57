"""A group of ranks as a binomial tree: values go up to its first rank and down from it.

    0 -> 1, 2, 4, 8, ...        the parent of a rank is its number without the lowest bit:
    4 -> 5, 6                   13 = 0b1101 -> 12 = 0b1100 -> 8 = 0b1000 -> 0
    8 -> 9, 10, 12              so below a rank are the ranks behind it, and most edges stay inside a host

A rank talks to its parent and its children alone: log2 N peers at most, and N - 1 connections in the whole group, where
torch's gather and scatter connect the first rank to every other one, its all-reduce waits for 2 (N - 1) messages one after the
other, and its barrier has 2 log2 N - 1 peers. gloo connects a pair when it is first used (TORCH_GLOO_LAZY_INIT, torch 2.8 and
later), so a group whose only traffic is this one holds no more sockets than that.

    messages   2 per edge and direction (the length, then the bytes); a value waits for 2 log2 N of them
    bytes      up: what a subtree holds, over each of its edges, or what it was joined to; down: the value

What travels is pickled, between ranks of one job; nothing that comes from a file is, and one rank pickles nothing. An error of
the connection (a rank that died) is raised where it is met, and not carried on.
"""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")


def parent_of(rank: int) -> int | None:
    """None for the first rank."""
    return rank & (rank - 1) if rank else None


def children_of(rank: int, world: int) -> list[int]:
    """In their order: the last has the most ranks below it."""
    lowest = (rank & -rank).bit_length() - 1 if rank else world.bit_length()
    return [rank + (1 << bit) for bit in range(lowest) if rank + (1 << bit) < world]


class Tree:
    """This rank's position in the tree of `group`, a gloo group; None where the world is one rank. All ranks make the same calls
    in the same order."""

    def __init__(self, group: dist.ProcessGroup | None):
        self._group = group
        self.rank, self.world = (0, 1) if group is None else (group.rank(), group.size())
        self._parent, self._children = parent_of(self.rank), children_of(self.rank, self.world)

    def gather(self, value: Value) -> list[Value] | None:
        """Every rank's value in their order, on the first rank; None on the others."""
        if self.world == 1:
            return [value]
        packed = {self.rank: pickle.dumps(value)}  # unpacked once, at the end
        for child in self._children:
            packed |= self._receive(child)
        if self._parent is not None:
            self._send(packed, self._parent)
            return None
        return [pickle.loads(packed[rank]) for rank in range(self.world)]

    def broadcast(self, value: Value) -> Value:
        """The first rank's value, on every rank; on the first rank the object itself."""
        if self._parent is not None:
            value = self._receive(self._parent)
        for child in reversed(self._children):
            self._send(value, child)
        return value

    def reduce(
        self, value: Value, join: Callable[[Value, Value], Value], lead: Callable[[Value], Value] = lambda value: value
    ) -> Value:
        """All values joined, two at a time, the first of lower ranks than the second, and what `lead` makes of that on the first
        rank: on every rank alike."""
        for child in self._children:
            value = join(value, self._receive(child))
        if self._parent is not None:
            self._send(value, self._parent)
        return self.broadcast(lead(value) if self.rank == 0 else value)

    def barrier(self) -> None:
        """Returns when every rank has called it. The first call of a group connects its tree, so that a rank that dies later is
        noticed at once, by all who would wait for it."""
        self.reduce(None, lambda *_: None)

    def _send(self, value: Any, peer: int) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        dist.send(torch.tensor(len(data)), group=self._group, group_dst=peer)
        dist.send(data, group=self._group, group_dst=peer)

    def _receive(self, peer: int) -> Any:
        length = torch.tensor(0)
        dist.recv(length, group=self._group, group_src=peer)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(data, group=self._group, group_src=peer)
        return pickle.loads(data.numpy().tobytes())
