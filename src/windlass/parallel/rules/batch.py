"""How a global batch is divided: tokens_per_step = micro-batches x micro_batch x ranks of the batch axes x sequence_length."""

from collections.abc import Iterator
from itertools import count

from windlass.errors import UserError
from windlass.parallel.config import Schedule
from windlass.parallel.rules.pipeline import micro_batch_errors, schedule_fits
from windlass.units import counted


def batch_errors(
    tokens_per_step: int,
    length: int,
    micro_batch: int,
    batch_ranks: int,
    schedule: Schedule,
    pp: int,
    is_auto: bool = False,
    per_sample: int = 1,
) -> Iterator[UserError]:
    """Where the sequences of a step do not divide over `batch_ranks` ranks, or the pipeline's schedule cannot run the number of
    micro-batches that results. `is_auto`: `micro_batch` is the least, and not the recipe's; `per_sample`: sequences that are in
    one micro-batch together."""
    sequences, per_round = tokens_per_step // length, micro_batch * batch_ranks
    if sequences % per_round == 0:
        rounds = sequences // per_round
        yield from micro_batch_errors(schedule, pp, rounds, per_round * length, micro_batch, per_sample)
        return
    near = near_batches(tokens_per_step, per_round * length, schedule, pp)
    on_each, is_cut = divmod(sequences, batch_ranks)
    micros = [
        str(micro)
        for micro in range(per_sample, 0 if is_cut else on_each + 1, per_sample)
        if on_each % micro == 0 and schedule_fits(schedule, pp, on_each // micro)
    ]
    remedy = f"the nearest that divide: run.tokens_per_step={' or '.join(map(str, near))}"
    if micros:
        remedy += f"; or, keeping it, run.micro_batch={' or '.join(micros[:6])}"
    yield UserError(
        f"run.tokens_per_step={tokens_per_step} ({sequences} sequences) on {counted(batch_ranks, 'rank')} with "
        f"run.micro_batch={'auto' if is_auto else micro_batch}",
        f"sequences per step must be a multiple of micro_batch x ranks = {per_round}",
        remedy,
    )


def sequence_errors(
    tokens_per_step: int, length: int, together: int, schedule: Schedule, pp: int
) -> Iterator[UserError]:
    """Where a step is no whole number of sequences. `together`: sequences of a micro-batch over the ranks that are known."""
    if tokens_per_step % length:
        near = " or ".join(map(str, near_batches(tokens_per_step, together * length, schedule, pp)))
        full, rest = divmod(tokens_per_step, length)
        which = "divide" if together == 1 else f"are whole micro-batches of {together} sequences, too"
        yield UserError(
            f"run.tokens_per_step={tokens_per_step} with data.sequence_length={length}",
            f"a global batch is whole sequences, and {tokens_per_step} = {full} x {length} + {rest}",
            f"the nearest that {which}: run.tokens_per_step={near}",
        )


def near_batches(tokens_per_step: int, tokens_per_round: int, schedule: Schedule, pp: int) -> list[int]:
    """The nearest tokens per step, below where there is one and above, that are whole micro-batches of `tokens_per_round` tokens
    over all ranks, as many as the schedule can run."""
    rounds = tokens_per_step // tokens_per_round
    below = next((number for number in range(rounds, 0, -1) if schedule_fits(schedule, pp, number)), None)
    above = next(number for number in count(rounds + 1) if schedule_fits(schedule, pp, number))
    return [number * tokens_per_round for number in (below, above) if number]
