"""`parallel.check`: checks, while a layout runs, what it relies on.

    every step       ranks of one model-parallel group (same position on the batch axes) get the same batch
    every step       no gradient is left from the step before
    every N steps,   weights and optimizer states that two ranks both hold (replicas, and what tensor ranks hold whole) are equal
    after the first, bit for bit: so a checkpoint is never made of ranks that have drifted apart, and the last one is sound
    before a save

Each rank hashes its own data and sends the hashes to all ranks, and every rank judges all of them. A fault on one rank is
therefore the same named error on every rank, and no rank is left waiting in a collective.

A hash is the sum of all words, each times an odd number of its own, modulo 2^64: equal tensors hash alike whatever their memory
layout, a flipped bit always shows, two differences cancel once in 2^64.

    sent per step    24 bytes from every rank to every rank; every N steps 8 bytes per tensor of weights and states more
    read per step    the batch; every N steps the rank's own weights and states once, in pieces (PIECE words of scratch)
    waits per step   one: the host reads the hashes before the forward, so it does not run ahead of the device
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from windlass.errors import OutOfSync
from windlass.parallel.config import ParallelConfig
from windlass.parallel.program import Batch, Program
from windlass.parallel.records import Record

PIECE: Final = 1 << 22  # words hashed at a time: 64 MiB of scratch
ODD: Final = -7046029254386353131  # 2^64 / golden ratio, as a signed number
WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NOTHING: Final = -1  # no parameter

Held = tuple[str, tuple[tuple[str, int], ...]]
"""A tensor's name, and which part of it: the position along each axis that cuts it."""
States = Callable[[], dict[str, torch.Tensor]]
"""An optimizer's states by name, each cut as its parameter is; the same names in the same order at every call."""


@torch.no_grad()
def hash_of(tensor: torch.Tensor) -> torch.Tensor:
    """0-dim int64, on the tensor's device. Of a DTensor: of this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    words = local.contiguous().view(-1).view(WORDS[local.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for start in range(0, words.numel(), PIECE):
        piece = words[start : start + PIECE].to(torch.int64)
        places = torch.arange(start, start + len(piece), device=local.device)
        total += (piece * (2 * places * ODD + 1)).sum()
    return total


def checked(program: Program, states: States, config: ParallelConfig) -> Program:
    """`program` as the loop calls it."""
    return Checked(program, states, config.check_every) if config.check else program


class Checked:
    """`program` and the `states` of its optimizer, checked. Collective: every rank makes it and calls it alike. Raises OutOfSync,
    on every rank alike."""

    def __init__(self, program: Program, states: States, every: int):
        self._program, self._states, self._every = program, states, every
        self.mesh = program.mesh
        self._step = 0
        held: list[list[Held]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(held, [_held(name, tensor) for name, tensor in self._named().items()])
        self._held = held

    def _named(self) -> dict[str, torch.Tensor]:
        """Parameters, in the order of the records, then states."""
        return {record.name: record.tensor for record in self._program.records()} | self._states()

    def run(self, batches: Sequence[Batch], count: torch.Tensor) -> torch.Tensor:
        self._step += 1
        self._check_step(batches)
        if self._step == 2 or (self._step - 1) % self._every == 0:
            self._check_held()
        return self._program.run(batches, count)

    def adapt(self, norm: torch.Tensor) -> None:
        self._program.adapt(norm)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """For a checkpoint: none is made of ranks that are out of step."""
        self._check_held()
        return self._program.state_tensors()

    def figures(self) -> dict[str, torch.Tensor]:
        return self._program.figures()

    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        return self._program.evaluate(batches)

    def records(self) -> list[Record]:
        return self._program.records()

    @property
    def _when(self) -> str:
        return f"step {self._step} since this start"

    def _check_step(self, batches: Sequence[Batch]) -> None:
        left = self._first_gradient()
        hashes = [hash_of(batch[name]) for batch in batches for name in sorted(batch)]
        own = hash_of(torch.stack(hashes))
        mesh = self.mesh
        place = (
            mesh.coordinate["replicate"] * mesh.layout.shard + mesh.coordinate["shard"]
        )  # apart from Mesh.batch_rank
        rows = _of_all_ranks(torch.stack([own.new_tensor(place), own, left]))
        first_of: dict[int, int] = {}
        for rank, (held_at, batch_hash, index) in enumerate(rows):
            if index != NOTHING:
                raise OutOfSync(
                    f"{self._held[rank][index][0]} on rank {rank} has a gradient before {self._when}",
                    "a step begins without gradients: what is left of the step before would be added to it",
                    "see that the optimizer drops all gradients after its step",
                )
            first = first_of.setdefault(held_at, rank)
            if rows[first][1] != batch_hash:
                raise OutOfSync(
                    f"ranks {first} and {rank} were given different batches at {self._when}",
                    "ranks that share a place on the batch axes (replicate, shard) compute parts of the same samples",
                    "slice data by Mesh.batch_rank, and see that these ranks read the same files",
                )

    def _first_gradient(self) -> torch.Tensor:
        """The number of the first parameter whose gradient is neither gone nor zero, else NOTHING. 0-dim."""
        records = self._program.records()
        found = torch.tensor(NOTHING, device=self.mesh.dense.device_type)
        for index in range(len(records) - 1, -1, -1):
            gradient = records[index].tensor.grad
            if gradient is not None:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                found = torch.where((local != 0).any().to(found.device), index, found)
        return found

    def _check_held(self) -> None:
        most = max(map(len, self._held))
        own = torch.zeros(most, dtype=torch.int64, device=self.mesh.dense.device_type)
        for index, tensor in enumerate(self._named().values()):
            own[index] = hash_of(tensor)
        rows = _of_all_ranks(own)
        first_of: dict[Held, tuple[int, int]] = {}
        for rank, held in enumerate(self._held):
            for part, value in zip(held, rows[rank]):
                first, expected = first_of.setdefault(part, (rank, value))
                if value != expected:
                    raise OutOfSync(
                        f"{part[0]} differs between ranks {first} and {rank} at {self._when}",
                        "ranks that hold the same part of a weight or of an optimizer state hold the same bits: they make the "
                        "same updates from the same sums",
                        "go on from the last checkpoint; if it comes again: another rank's memory or kernel is at fault, or a "
                        "gradient that is not summed over these ranks (windlass verify)",
                    )


def _held(name: str, tensor: torch.Tensor) -> Held:
    if not isinstance(tensor, DTensor):
        return name, ()
    coordinate, axes = tensor.device_mesh.get_coordinate(), tensor.device_mesh.mesh_dim_names
    assert coordinate is not None and axes is not None
    places = zip(axes, coordinate, tensor.placements, strict=True)
    return name, tuple((axis, at) for axis, at, placement in places if not placement.is_replicate())


def _of_all_ranks(own: torch.Tensor) -> list[list[int]]:
    """Every rank's numbers, on every rank. The host waits for them."""
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)  # of the default group, over which the mesh is made
    rows: list[list[int]] = torch.stack(gathered).tolist()
    return rows
