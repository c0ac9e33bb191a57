"""Writing one checkpoint: plan, write, commit, with one verdict for all ranks. checkpoints.py calls it.

This is what dcp.save does with the same planner and writer, in three exchanges: whether every rank holds the pieces that it held
at the last save; if not, the plans go to rank 0 and come back without duplicates; the places of all chunks go to rank 0, which
commits. Our own loop, because an error must arrive as itself on every rank (dcp wraps it), and one process without
torch.distributed must save without a warning.

Planning is central: rank 0 looks at every piece of every rank, tens of microseconds each (docs/scale.md). Which piece a rank
writes follows from names, shapes and cuts, and none of them changes while a run trains. So the first save plans, and a later one
uses its plan: a rank says that its pieces are the same, and sends the hashes of its file.
"""

from dataclasses import dataclass, field, replace

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from windlass.checkpoint.exchange import Exchange
from windlass.checkpoint.index import SavedTensor
from windlass.checkpoint.staging import LocalPlanner
from windlass.checkpoint.storage import Entries, TensorWriter, chunk_bytes, entries_of, saved_tensors


@dataclass
class Plan:
    """What the last save of this process planned. Empty until one is committed."""

    asked: SavePlan | None = None
    """The pieces that this rank holds."""
    own: SavePlan | None = None
    """Those of them that it writes."""
    starts: list[int] = field(default_factory=list)
    """Where each of them begins in its file."""
    tensors: dict[str, SavedTensor] | None = None
    """On rank 0: the index."""
    num_bytes: int = 0
    """On rank 0: of all tensors."""
    num_planned: int = 0
    """Pieces that this rank has planned for all ranks, over all saves of the process: for the counts of scripts/scale.py."""

    def fits(self, asked: SavePlan, is_first: bool) -> bool:
        return asked == self.asked and self.own is not None and (self.tensors is not None or not is_first)


def write_checkpoint(
    tensors: dict[str, torch.Tensor],
    local: dict[str, torch.Tensor],
    writer: TensorWriter,
    exchange: Exchange,
    plan: Plan | None = None,
) -> None:
    """Returns on all ranks when the checkpoint is committed. Where it is not, raises on all ranks and removes the draft.

    `tensors` give shapes, dtypes and placements; the bytes come from `local`, this rank's shards by name. `plan` is that of the
    save before, and is that of this one afterwards.
    """
    planner, first, plan = LocalPlanner(local), exchange.rank == 0, plan or Plan()

    held: list[SavePlan] = []

    def is_same() -> bool:
        planner.set_up_planner(tensors, None, first)
        writer.set_up_storage_writer(first, rank=exchange.rank)
        held.append(writer.prepare_local_plan(planner.create_local_plan()))
        return plan.fits(held[0], first)

    try:
        if exchange.reduce(is_same, all):
            token = exchange.from_first(lambda: writer.begin(plan.num_bytes))
            _write_again(plan, token, planner, writer, exchange)
        else:
            _write_planned(held[0], plan, planner, writer, exchange)
    finally:
        if first and writer.draft is not None and writer.manifest is None:
            writer.draft.discard()


def _write_planned(
    asked: SavePlan, plan: Plan, planner: LocalPlanner, writer: TensorWriter, exchange: Exchange
) -> None:
    """All ranks' pieces planned by rank 0; `plan` is theirs afterwards."""
    plan.asked = plan.own = plan.tensors = None
    metadata: list[Metadata] = []

    def of_all(plans: list[SavePlan]) -> list[SavePlan]:
        plan.num_planned += sum(len(one.items) for one in plans)
        plans, saved = planner.create_global_plan(plans)
        metadata.append(saved)
        plan.num_bytes = sum(chunk_bytes(item) for one in plans for item in one.items)
        return writer.prepare_global_plan(plans)

    def commit(results: list[list[WriteResult]]) -> None:
        tensors = saved_tensors(metadata[0], [result for rank in results for result in rank])
        writer.commit(tensors, _joined([entries_of(rank) for rank in results]), exchange.world)
        plan.tensors = tensors

    own: SavePlan = exchange.reduce_scatter(lambda: asked, of_all)
    starts: list[int] = []

    def write() -> list[WriteResult]:
        results = writer.write_data(planner.finish_plan(own), planner).value()
        starts.extend(result.storage_data.at for result in results)
        return results

    exchange.reduce(write, commit)
    plan.asked, plan.own, plan.starts = asked, own, starts


def _write_again(plan: Plan, token: str, planner: LocalPlanner, writer: TensorWriter, exchange: Exchange) -> None:
    """The same pieces at the same places of the same files: a rank sends the entry of its file alone."""
    assert plan.own is not None
    own = replace(plan.own, storage_data=token)

    def write() -> Entries:
        results = writer.write_data(planner.finish_plan(own), planner).value()
        assert [result.storage_data.at for result in results] == plan.starts, "a piece has moved in its file"
        return entries_of(results)

    def commit(entries: list[Entries]) -> None:
        assert plan.tensors is not None
        writer.commit(plan.tensors, _joined(entries), exchange.world)

    exchange.reduce(write, commit)


def _joined(entries: list[Entries]) -> Entries:
    return {name: entry for rank in entries for name, entry in rank.items()}
