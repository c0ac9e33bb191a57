"""How many bytes the blocks keep for backward, and which of them recompute so that a budget holds.

The bytes are counted, not derived: a block's forward runs once on fake tensors (shapes and dtypes of the real ones, no memory,
no arithmetic), and the block keeps the storages that are still alive afterwards. The count therefore covers each family, dtype,
attention kernel and frozen part without a formula. It includes the block's input and all that the block makes, except its output,
which is the next block's input. It excludes parameters, rope tables (shared by all blocks) and the activations of embedding,
norm and head.

Where tp or context cut the block, it is cut here as there, over groups that send nothing: what GATHER and the exchanges make is
counted with the rest. A pipeline rank keeps its blocks' activations of several micro-batches, as many as its schedule has in
flight at once (rules/schedules.py), and its budget is for all of them. The output of its stage, which waits to be sent, is not in
the count.

The choice (`recompute: selective` with `activation_gib`): all blocks do about the same work, and full repeats a whole forward
where selective repeats only the cheap part. So as few blocks as possible are full, and of the others as few as possible
selective. The full blocks come first and those that keep all come last: backward frees from the end, so a block recomputes into
memory that later blocks have freed.

torch has a memory budget of its own for compiled regions (torch._functorch.config.activation_memory_budget, arXiv
2006.09503's knapsack). It is a fraction and not a number of bytes, works under compile only, and does not report its choice.

Compiled blocks keep at most this much, since Inductor's partitioner recomputes cheap operators itself, plus the state of the
random generator per recomputed block (5,056 bytes on CPU), which nothing here uses. Source of the kinds: recompute.py.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from windlass.model.architecture import Architecture
from windlass.model.lora.adapter import Adapter, frozen_base
from windlass.model.transformer import Decoder
from windlass.parallel.build import store
from windlass.parallel.config import RECOMPUTES, ParallelConfig
from windlass.parallel.context import apply_context
from windlass.parallel.mesh import Mesh
from windlass.parallel.recompute import apply_recompute
from windlass.parallel.rules.budget import check_least
from windlass.parallel.stages import blocks_in_flight
from windlass.parallel.tensor import apply_tensor
from windlass.precision.policy import Precision
from windlass.ranks.owned_part import local_tensor
from windlass.units import GIB, format_bytes


@dataclass(frozen=True)
class Kept:
    """Bytes that one block keeps for the backward of one micro-batch, by the kind of its recomputation."""

    none: int
    selective: int
    full: int

    def times(self, number: int) -> "Kept":
        """The bytes that `number` micro-batches keep."""
        return Kept(number * self.none, number * self.selective, number * self.full)


@dataclass(frozen=True)
class RecomputePlan:
    """What each block does, in order, and what they keep together."""

    kinds: tuple[str, ...]
    kept_bytes: int | None = None
    """Bytes kept by the pipeline rank that keeps the most. None where the recipe has no budget."""
    in_flight: int = 1
    """The most micro-batches that a rank keeps at once."""

    def __str__(self) -> str:
        counts = Counter(self.kinds)
        words = ", ".join(f"{counts[kind]} {kind}" for kind in RECOMPUTES if counts[kind])
        if self.kept_bytes is None:
            return f"recompute {words.partition(' ')[2]}"
        kept = format_bytes(self.kept_bytes)
        if self.in_flight == 1:
            return f"recompute in {len(self.kinds)} blocks: {words}; they keep {kept} per micro-batch"
        return (
            f"recompute in {len(self.kinds)} blocks: {words}; a rank's keep at most {kept} of the up to {self.in_flight} "
            "micro-batches in flight"
        )


@dataclass(frozen=True)
class Workload:
    """What decides how many bytes the blocks keep. `shape_BT`: tokens of a micro-batch. `frozen`: parameters without a gradient,
    beside an adapter's base. `num_micro`: micro-batches of a step."""

    architecture: Architecture
    config: ParallelConfig
    precision: Precision
    device_type: str
    shape_BT: tuple[int, int]
    frozen: Collection[str] = ()
    adapter: Adapter | None = None
    num_micro: int = 1


def plan_recompute(work: Workload, mesh: Mesh | None = None) -> RecomputePlan:
    """What every block recomputes. `mesh`: as for count_kept. Raises UserError where even full keeps more than
    `activation_gib`."""
    config, num_layers = work.config, work.architecture.num_layers
    if config.activation_gib is None:
        return RecomputePlan((config.recomputes,) * num_layers)
    kept = count_kept(work, mesh)
    ranks = blocks_in_flight(work.architecture, config, work.num_micro)
    check_least([block.full for block in kept], ranks, config, work.shape_BT)
    kinds: dict[int, str] = {}
    most = 0
    for blocks in ranks:
        times = [kept[index].times(number) for index, number in blocks.items()]
        chosen = choose_recompute(times, int(config.activation_gib * GIB))
        kinds |= dict(zip(blocks, chosen, strict=True))
        most = max(most, sum(_bytes(block, kind) for block, kind in zip(times, chosen, strict=True)))
    numbers = [number for blocks in ranks for number in blocks.values()]
    return RecomputePlan(tuple(kinds[index] for index in range(num_layers)), most, max(numbers))


def check_budget(work: Workload) -> None:
    """Raises UserError where even full keeps more than `activation_gib`. No ranks are needed: full keeps a block's input, of
    which those that share it have equal parts."""
    config = work.config
    if config.activation_gib is None:
        return
    full = [block.full // (config.tp * config.context) for block in count_kept(work)]
    check_least(full, blocks_in_flight(work.architecture, config, work.num_micro), config, work.shape_BT)


def choose_recompute(kept: Sequence[Kept], budget_bytes: int) -> tuple[str, ...]:
    """The kind of each block: fewest full, then fewest selective, within the budget, which all of them full must meet."""
    middle = ["selective" if block.selective < block.none else "none" for block in kept]
    total = sum(_bytes(block, kind) for block, kind in zip(kept, middle, strict=True))
    kinds = list(middle)
    for index in range(len(kept)):  # full from the front
        if total <= budget_bytes:
            break
        total -= _bytes(kept[index], middle[index]) - kept[index].full
        kinds[index] = "full"
    for index in reversed(range(len(kept))):  # all kept from the end
        more = kept[index].none - _bytes(kept[index], kinds[index])
        if kinds[index] == "selective" and total + more <= budget_bytes:
            total += more
            kinds[index] = "none"
    assert total <= budget_bytes, (total, budget_bytes)
    return tuple(kinds)


def _bytes(block: Kept, kind: str) -> int:
    return {"none": block.none, "selective": block.selective, "full": block.full}[kind]


def count_kept(work: Workload, mesh: Mesh | None = None) -> list[Kept]:
    """What each block keeps of one micro-batch on this rank. Blocks that differ in nothing relevant are counted once. `mesh`:
    where tp or context cut them; nothing is sent."""
    architecture, frozen = work.architecture, {*work.frozen, *frozen_base(work.architecture, work.adapter)}
    counted: dict[object, Kept] = {}
    blocks = []
    with torch.device("meta"):
        names = [name for name, _ in Decoder(architecture, adapter=work.adapter).named_parameters()]
    trains_below = any(
        name not in frozen for name in names if not name.startswith(("model.layers.", "model.norm.", "lm_head."))
    )
    for index in range(architecture.num_layers):
        prefix = f"model.layers.{index}."
        trained = tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix) and name not in frozen)
        kind = (index in architecture.unrotated_layers, index in architecture.window_layers, trained, trains_below)
        if kind not in counted:
            part = _Part(work, index, trained, trains_below, mesh)
            counted[kind] = Kept(*(part.kept_bytes(how) for how in RECOMPUTES))
        blocks.append(counted[kind])
        trains_below = trains_below or bool(trained)
    return blocks


@dataclass(frozen=True)
class _Part:
    """Embedding and one block of the model, to be run on fake tensors. `trained`: the block's parameters that have a gradient;
    `trains_below`: whether its input has one."""

    work: Workload
    index: int
    trained: Collection[str]
    trains_below: bool
    mesh: Mesh | None

    def kept_bytes(self, kind: str) -> int:
        """Bytes alive after the block's forward, with recomputation of this kind."""
        work, mesh = self.work, self.mesh
        precision = replace(work.precision, stored=work.precision.compute)  # products read no other
        layers = range(self.index, self.index + 1)
        with torch.device("meta"):
            part = Decoder(work.architecture, layers=layers, last=False, adapter=work.adapter)
        store(part, precision, frozen_base(work.architecture, work.adapter))
        if mesh is not None:
            apply_tensor(part, part.blocks, mesh.dense["tp"])
            apply_context(part, mesh, work.config.context_kind)
        apply_recompute(part.blocks, [kind])
        alive = _Alive()
        part.blocks[0].register_forward_pre_hook(alive.enter)
        (rows, length), context = work.shape_BT, 1 if mesh is None else mesh.layout.context
        shapes = {name: local_tensor(parameter).shape for name, parameter in part.named_parameters()}
        with FakeTensorMode(), torch.device(work.device_type):
            parameters = {name: self._empty(name, p, shapes[name]) for name, p in part.named_parameters()}
            ids_BT = torch.zeros(rows, length // context, dtype=torch.int64)
            keys = {"keys": torch.zeros(rows, dtype=torch.int64)} if part.drops else {}
            with alive:
                out_BTD = torch.func.functional_call(part, parameters, (ids_BT,), keys)
            return alive.num_bytes(out_BTD, *map(local_tensor, parameters.values()))

    def _empty(self, name: str, parameter: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """A fake one in place of `parameter`, which is on meta. `shape`: of this rank's part."""
        whole = local = torch.empty(shape, dtype=parameter.dtype)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            whole = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
        return whole.requires_grad_(self._has_gradient(name))

    def _has_gradient(self, name: str) -> bool:
        _, inside, own = name.partition(f"model.layers.{self.index}.")
        return own in self.trained if inside else self.trains_below


class _Alive(TorchDispatchMode):
    """Storages that operators made, by weak references: it can list those alive at any time, whoever holds them."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor)
        return result

    def enter(self, _block: nn.Module, args: tuple[Any, ...]) -> None:
        """Start counting: storages made before belong to others, except the block's input."""
        self._before, self._made = self._made, {}
        self._before.pop(StorageWeakRef(args[0].untyped_storage()).cdata)
        self._note(args[0])

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        weak = StorageWeakRef(storage)
        if weak.cdata not in self._before:  # a weak reference keeps its address from being used again
            self._made.setdefault(weak.cdata, (weak, storage.nbytes()))

    def num_bytes(self, *without: torch.Tensor) -> int:
        others = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in without}
        return sum(size for key, (weak, size) in self._made.items() if key not in others and not weak.expired())
