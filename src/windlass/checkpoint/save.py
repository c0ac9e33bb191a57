"""Writing one checkpoint: plan, write, commit, with one verdict for all ranks. checkpoints.py calls it.

This is what dcp.save does with the same planner and writer, in two exchanges: the plans go to rank 0 and come back
without duplicates and with the token; the places of all chunks go to rank 0, which commits. Our own loop, because an
error must arrive as itself on every rank (dcp wraps it), and one process without torch.distributed must save without
a warning.
"""

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from windlass.checkpoint.exchange import Exchange
from windlass.checkpoint.staging import LocalPlanner
from windlass.checkpoint.storage import TensorWriter


def write_checkpoint(
    tensors: dict[str, torch.Tensor], local: dict[str, torch.Tensor], writer: TensorWriter, exchange: Exchange
) -> None:
    """Returns on all ranks when the checkpoint is committed. Where it is not, raises on all ranks and removes the draft.

    `tensors` give shapes, dtypes and placements; the bytes come from `local`, this rank's shards by name.
    """
    planner, first = LocalPlanner(local), exchange.rank == 0
    metadata: list[Metadata] = []

    def local_plan() -> SavePlan:
        planner.set_up_planner(tensors, None, first)
        writer.set_up_storage_writer(first, rank=exchange.rank)
        return writer.prepare_local_plan(planner.create_local_plan())

    def global_plan(plans: list[SavePlan]) -> list[SavePlan]:
        plans, saved = planner.create_global_plan(plans)
        metadata.append(saved)
        return writer.prepare_global_plan(plans)

    try:
        plan = exchange.reduce_scatter(local_plan, global_plan)
        exchange.reduce(
            lambda: writer.write_data(planner.finish_plan(plan), planner).value(),
            lambda results: writer.finish(metadata[0], results),
        )
    finally:
        if first and writer.draft is not None and writer.manifest is None:
            writer.draft.discard()
