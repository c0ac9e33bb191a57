"""Compares the ranks while a layout runs: what several ranks hold before every save, and with `parallel.check` their batches.

before a save    always: every tensor of the checkpoint that several ranks hold (replicas, what tensor ranks hold whole, counters,
                 the loss scale) is equal bit for bit, so no checkpoint is made of ranks that have drifted apart. And so is
                 every tensor of an adapter's frozen base: its factors would be fitted to weights that no file holds
every step       with `parallel.check`: ranks of one model-parallel group (same position on the batch axes) get the same batch,
                 and no gradient is left from the step before

Each rank sends hashes of its own data to all ranks, and every rank judges all of them. A fault on one rank is therefore the same
named error on every rank, and no rank waits in a collective.

A hash is the sum of all words, each times an odd number of its own, modulo 2^64. A tensor is read as words of 4 bytes, or of its
element size where that is less, so equal tensors hash alike whatever their memory layout. One flipped bit always changes the
hash. So do two swapped words, and equal changes of opposite sign at two positions, in tensors of less than 2^31 words. Any other
two differences cancel once in 2^64.

Not compared: a tensor that one rank alone holds; the head's mirror of a tied embedding, which the embedding overwrites before
every forward (tie.py). Not seen: a fault that reaches all holders alike, such as a wrong gradient before the sum over ranks.

    sent per save    one all-gather of 8 bytes per shared tensor; at the start 8 bytes per tensor, once
    read per save    this rank's shared tensors once, in pieces (PIECE words of scratch); one flag reaches the host. Of replicas
                     12 bytes per trained parameter; of a frozen base 2 in bf16 and 0.53 in NF4, a sixth and less of what full
                     training reads, so it is read at every save too
    sent per step    with `parallel.check`, 24 bytes from every rank to every rank; the host waits for them before the forward
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from windlass.data.batch_fields import Batch
from windlass.errors import OutOfSync
from windlass.parallel.config import ParallelConfig
from windlass.parallel.program import Program
from windlass.parallel.records import Record
from windlass.ranks.owned_part import local_tensor

PIECE: Final = 1 << 22  # words hashed at a time: 64 MiB of scratch
ODD: Final = -7046029254386353131  # 2^64 / golden ratio, as a signed number
WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
NOTHING: Final = -1  # no parameter
MOST_RANKS: Final = 8  # named in a message


@torch.no_grad()
def hash_of(tensor: torch.Tensor) -> torch.Tensor:
    """0-dim int64, on the tensor's device. Of a DTensor: of this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    words = local.contiguous().view(-1).view(WORDS[local.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for start in range(0, words.numel(), PIECE):
        piece = words[start : start + PIECE].to(torch.int64)
        positions = torch.arange(start, start + len(piece), device=local.device)
        total += (piece * (2 * positions * ODD + 1)).sum()
    return total


class Replicas:
    """The tensors of a checkpoint that several ranks hold. Collective: every rank makes it, and calls it, alike."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], device_type: str):
        """`tensors`: this rank's; every later call brings the same names. `device_type`: where the ranks exchange numbers."""
        self._device = device_type
        most = torch.tensor(len(tensors), device=device_type)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        keys = {_key(name, tensor): name for name, tensor in tensors.items()}
        padded = list(keys) + [0] * (int(most) - len(keys))
        rows = _of_all_ranks(torch.tensor(padded, dtype=torch.int64, device=device_type)).tolist()
        holders = Counter(key for row in rows for key in row if key)
        shared = [[key for key in row if holders[key] > 1] for row in rows]
        self._names = [keys[key] for key in shared[dist.get_rank()]]
        self._width = max(map(len, shared))
        first_of: dict[int, int] = {}
        flat = [key for row in shared for key in row + [0] * (self._width - len(row))]
        self._first = [first_of.setdefault(key, at) for at, key in enumerate(flat)]
        """The index of the first number that must equal it, for each number that the ranks send."""
        self._first_index = torch.tensor(self._first, device=device_type)

    def compare(self, tensors: Mapping[str, torch.Tensor], step: int) -> None:
        """Raises OutOfSync, on every rank alike, where two ranks hold other bits of one part of a tensor."""
        if not self._width:
            return
        own = torch.zeros(self._width, dtype=torch.int64, device=self._device)
        for index, name in enumerate(self._names):
            own[index] = hash_of(tensors[name])
        values = _of_all_ranks(own).view(-1)
        differs = values != values[self._first_index]
        if differs.any():
            raise self._drifted(values.tolist(), differs.nonzero().view(-1).tolist(), step)

    def _drifted(self, values: list[int], different: list[int], step: int) -> OutOfSync:
        at = different[0]
        holder = at // self._width
        box = [self._names[at % self._width] if dist.get_rank() == holder else None]
        dist.broadcast_object_list(box, holder)  # another stage of a pipeline does not know the name
        by_value: dict[int, list[int]] = {}
        for index, first in enumerate(self._first):
            if first == self._first[at]:
                by_value.setdefault(values[index], []).append(index // self._width)
        *few, most = sorted(by_value.values(), key=len)
        odd = [rank for ranks in few for rank in ranks]
        more = len({self._first[index] for index in different}) - 1
        where = (
            f"on {_ranks(odd)} differs from {_ranks(most)}"
            if len(odd) < len(most)
            else (f"differs between {_ranks(sorted(odd + most))}")
        )
        return OutOfSync(
            f"{box[0]} {where} after step {step}" + f", and {more} more tensors differ" * (more > 0),
            "ranks that hold the same part of a weight or of an optimizer state hold the same bits, since they make the same "
            "updates from the same sums; this step was not saved",
            "start the same command again: it goes on from the last checkpoint. If the error comes again, test the memory and "
            "the devices of these ranks, and prove the layout (windlass verify)",
        )


def _key(name: str, tensor: torch.Tensor) -> int:
    """A hash of a tensor's name and of the part that this rank holds: the position along each axis that cuts it. Never 0."""
    part: list[tuple[str, int]] = []
    if isinstance(tensor, DTensor):
        coordinate, axes = tensor.device_mesh.get_coordinate(), tensor.device_mesh.mesh_dim_names
        assert coordinate is not None and axes is not None
        cuts = zip(axes, coordinate, tensor.placements, strict=True)
        part = [(axis, at) for axis, at, placement in cuts if not placement.is_replicate()]
    digest = blake2b(repr((name, part)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True) or 1


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 and 1`, `ranks 0, 1, 2 and 5 more`."""
    named = [str(rank) for rank in ranks[:MOST_RANKS]]
    if len(ranks) > MOST_RANKS:
        named.append(f"{len(ranks) - MOST_RANKS} more")
    return f"rank {named[0]}" if len(named) == 1 else f"ranks {', '.join(named[:-1])} and {named[-1]}"


def checked_program(program: Program, config: ParallelConfig) -> Program:
    """`program` as the loop calls it."""
    return Checked(program) if config.check else program


class Checked:
    """`program`, checked in every step. Collective: every rank calls it alike. Raises OutOfSync, on every rank alike."""

    def __init__(self, program: Program):
        self._program = program
        self.mesh = program.mesh
        self._step = 0

    def run(self, batches: Sequence[Batch], count: torch.Tensor) -> torch.Tensor:
        self._step += 1
        self._check_step(batches)
        return self._program.run(batches, count)

    def adapt(self, norm: torch.Tensor) -> None:
        self._program.adapt(norm)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return self._program.state_tensors()

    def figures(self) -> dict[str, torch.Tensor]:
        return self._program.figures()

    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        return self._program.evaluate(batches)

    def score(self, batches: Sequence[Batch], adapted: bool = True) -> torch.Tensor:
        return self._program.score(batches, adapted)

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
        batch_rank = (
            mesh.coordinate["replicate"] * mesh.layout.shard + mesh.coordinate["shard"]
        )  # apart from Mesh.batch_rank
        rows = _of_all_ranks(torch.stack([own.new_tensor(batch_rank), own, left])).tolist()
        first_of: dict[int, int] = {}
        for rank, (held_at, batch_hash, index) in enumerate(rows):
            if index != NOTHING:
                box = [self._program.records()[index].name if dist.get_rank() == rank else None]
                dist.broadcast_object_list(box, rank)
                raise OutOfSync(
                    f"{box[0]} on rank {rank} has a gradient before {self._when}",
                    "a step begins without gradients: what is left of the step before would be added to it",
                    "see that the optimizer drops all gradients after its step",
                )
            first = first_of.setdefault(held_at, rank)
            if rows[first][1] != batch_hash:
                raise OutOfSync(
                    f"ranks {first} and {rank} were given different batches at {self._when}",
                    "ranks that share a coordinate on the batch axes (replicate, shard) compute parts of the same samples",
                    "slice data by Mesh.batch_rank, and see that these ranks read the same files",
                )

    def _first_gradient(self) -> torch.Tensor:
        """The number of the first parameter whose gradient is neither gone nor zero, else NOTHING. 0-dim."""
        records = self._program.records()
        found = torch.tensor(NOTHING, device=self.mesh.dense.device_type)
        for index in range(len(records) - 1, -1, -1):
            gradient = records[index].tensor.grad
            if gradient is not None:
                found = torch.where((local_tensor(gradient) != 0).any().to(found.device), index, found)
        return found


def _of_all_ranks(own: torch.Tensor) -> torch.Tensor:
    """Every rank's numbers, on every rank: [ranks, numbers]."""
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)  # of the default group, over which the mesh is made
    return torch.stack(gathered)
