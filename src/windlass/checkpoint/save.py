"""Writing one checkpoint: plan, write, commit, with one verdict for all ranks. checkpoints.py calls it.

This is what dcp.save does with the same planner and writer, in four exchanges: whether every rank holds the pieces that it held
at the last save; if not, the plans go to rank 0 and come back without duplicates; rank 0 makes a draft and sends its token; the
places of all chunks go to rank 0, which commits. Our own loop, because an error must arrive as itself on every rank (dcp wraps
it), and one process without torch.distributed must save without a warning.

Planning is central: rank 0 looks at every piece of every rank, tens of microseconds each (docs/scale.md). Which piece a rank
writes follows from names, shapes and cuts, and none of them changes while a run trains. So a run plans once, in the background
as it starts, and a later save asks only whether everything is as it was. From the second on a rank sends the hashes of its file.

A rank knows what it will write before a byte is copied: of what N ranks hold alike (DDP, HSDP's replicas) each copies and holds
one N-th.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from windlass.checkpoint.exchange import Exchange
from windlass.checkpoint.index import SavedTensor
from windlass.checkpoint.staging import LocalPlanner
from windlass.checkpoint.storage import Entries, TensorWriter, chunk_bytes, entries_of, saved_tensors


@dataclass
class Plan:
    """Which rank writes what, and from the first commit on, where. Empty until it is made."""

    held: dict[str, Any] | None = None
    """The tensors of this rank: their shapes, dtypes and cuts."""
    own: SavePlan | None = None
    """The pieces that it writes."""
    starts: list[int] = field(default_factory=list)
    """Where each of them begins in its file, once that was committed."""
    metadata: Metadata | None = None
    """On rank 0, until the first commit."""
    tensors: dict[str, SavedTensor] | None = None
    """On rank 0, from the first commit on: the index."""
    num_bytes: int = 0
    """On rank 0: of all tensors."""
    num_planned: int = 0
    """Pieces that this rank has planned for all ranks, over all saves of the process: for the counts of scripts/scale.py."""

    @property
    def written(self) -> set[str]:
        """Names of the tensors of which this rank writes what it holds."""
        assert self.own is not None
        return {item.index.fqn for item in self.own.items}


def write_checkpoint(
    tensors: dict[str, torch.Tensor], local: dict[str, torch.Tensor], writer: TensorWriter, exchange: Exchange
) -> None:
    """Plans and writes. `tensors` give shapes, dtypes and placements; the bytes come from `local`, this rank's shards by name."""
    plan = Plan()
    plan_save(tensors, exchange, plan)
    write_planned(local, writer, exchange, plan)


def plan_save(tensors: dict[str, torch.Tensor], exchange: Exchange, plan: Plan) -> None:
    """Fills `plan` for `tensors`, unless it is for such already. Collective. Raises TypeError for what is no tensor."""
    found: dict[str, Any] = {}

    def is_same() -> bool:
        found.update({name: _held(name, tensor) for name, tensor in tensors.items()})
        return plan.own is not None and plan.held == found

    if exchange.reduce(is_same, all):
        return
    plan.held = plan.own = plan.tensors = plan.metadata = None
    planner, first = LocalPlanner({}), exchange.rank == 0

    def asked() -> SavePlan:
        planner.set_up_planner(tensors, None, first)
        return planner.create_local_plan()

    def of_all(plans: list[SavePlan]) -> list[SavePlan]:
        plan.num_planned += sum(len(one.items) for one in plans)
        plans, plan.metadata = planner.create_global_plan(plans)
        plan.num_bytes = sum(chunk_bytes(item) for one in plans for item in one.items)
        return plans

    own: SavePlan = exchange.reduce_scatter(asked, of_all)
    plan.held, plan.own, plan.starts = found, own, []


def _held(name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
    """What decides which pieces of a tensor a rank has."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is not a tensor; put it into the trainer state")
    cut = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
    return tensor.shape, tensor.dtype, *cut


def write_planned(local: dict[str, torch.Tensor], writer: TensorWriter, exchange: Exchange, plan: Plan) -> None:
    """Returns on all ranks when the checkpoint is committed. Where it is not, raises on all ranks and removes the draft.

    `local`: at least what `plan.written` names.
    """
    first = exchange.rank == 0
    writer.set_up_storage_writer(first, rank=exchange.rank)
    try:
        _write(local, writer, exchange, plan)
    finally:
        if first and writer.draft is not None and writer.manifest is None:
            writer.draft.discard()


def _write(local: dict[str, torch.Tensor], writer: TensorWriter, exchange: Exchange, plan: Plan) -> None:
    """Where the same pieces were committed before, they are at the same places of the same files: a rank sends the entry of its
    file alone."""
    token, is_again = exchange.from_first(lambda: (writer.begin(plan.num_bytes), plan.tensors is not None))
    assert plan.own is not None
    planner, own, starts = LocalPlanner(local), replace(plan.own, storage_data=token), list[int]()

    def write() -> list[WriteResult] | Entries:
        results = writer.write_data(planner.finish_plan(own), planner).value()
        starts.extend(result.storage_data.at for result in results)
        assert not is_again or starts == plan.starts, "a piece has moved in its file"
        return entries_of(results) if is_again else results

    def commit(written: list[Any]) -> None:
        entries = written if is_again else [entries_of(results) for results in written]
        if not is_again:
            assert plan.metadata is not None
            tensors = saved_tensors(plan.metadata, [result for results in written for result in results])
        else:
            assert plan.tensors is not None
            tensors = plan.tensors
        writer.commit(tensors, {name: entry for one in entries for name, entry in one.items()}, exchange.world)
        plan.tensors, plan.metadata = tensors, None

    exchange.reduce(write, commit)
    plan.starts = starts
