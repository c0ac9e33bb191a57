"""How a global batch is divided: tokens_per_step = micro-batches x micro_batch x ranks of the batch axes x sequence_length."""

from collections.abc import Iterator

from windlass.errors import UserError
from windlass.parallel.config import Schedule
from windlass.parallel.rules.pipeline import micro_batch_errors


def batch_errors(
    tokens_per_step: int,
    length: int,
    micro_batch: int,
    batch_ranks: int,
    schedule: Schedule,
    pp: int,
    is_auto: bool = False,
) -> Iterator[UserError]:
    """Where the sequences of a step do not divide over `batch_ranks` ranks, or the pipeline's schedule cannot run the number of
    micro-batches that results. `is_auto`: `micro_batch` is the least, and not the recipe's."""
    sequences, per_round = tokens_per_step // length, micro_batch * batch_ranks
    if sequences % per_round == 0:
        yield from micro_batch_errors(schedule, pp, sequences // per_round, per_round * length, micro_batch)
        return
    below, above = sequences // per_round * per_round, (sequences // per_round + 1) * per_round
    near = [str(n * length) for n in (below, above) if n]
    micros = [str(m) for m in range(1, sequences + 1) if sequences % (m * batch_ranks) == 0]
    remedy = f"the nearest that divide: run.tokens_per_step={' or '.join(near)}"
    if micros:
        remedy += f"; or, keeping it, run.micro_batch={' or '.join(micros[:6])}"
    yield UserError(
        f"run.tokens_per_step={tokens_per_step} ({sequences} sequences) on {batch_ranks} ranks with "
        f"run.micro_batch={'auto' if is_auto else micro_batch}",
        f"sequences per step must be a multiple of micro_batch x ranks = {per_round}",
        remedy,
    )
