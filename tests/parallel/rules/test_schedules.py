"""What each schedule refuses, with remedies that work; and how long ranks wait, by what they executed."""

from unittest import mock

import pytest
from torch.distributed.pipelining.stage import PipelineStage

from tests.parallel import tiny
from windlass.errors import UserError
from windlass.parallel.config import ParallelConfig
from windlass.parallel.rules.schedules import KINDS, in_flight, owners


def test_stages_are_on_ranks_in_a_line_in_loops_or_in_a_v():
    assert owners("gpipe", 3) == owners("1f1b", 3) == (0, 1, 2)
    assert owners("interleaved-1f1b", 3) == owners("interleaved-zero-bubble", 3) == (0, 1, 2, 0, 1, 2)
    assert owners("zbv", 3) == (0, 1, 2, 2, 1, 0)


def test_zero_is_1_where_a_pipeline_leaves_it_open_and_the_dump_loads_again():
    config = ParallelConfig(pp=2, shard=2)
    assert config.zero == 1 and ParallelConfig(**config.model_dump()) == config
    assert config.layout(4).pp == 2 and config.layout(4).batch_ranks == 2
    assert ParallelConfig(pp=2).layout(8).shard == 4 and ParallelConfig(pp=2, zero=0).layout(8).replicate == 4
    with pytest.raises(UserError, match="a multiple of pp = 2, or make pp a divisor of 3"):
        ParallelConfig(pp=2).layout(3)
    with pytest.raises(UserError, match="2 x 1 x 3 = 6"):
        ParallelConfig(pp=2, shard=3).layout(8)


# ---- the executed log on a unit clock


def executed(pp, schedule, num_micro):
    """What this rank ran, in order: (F, B, I or W, stage, micro-batch)."""
    log = []
    forward, backward = PipelineStage.forward_one_chunk, PipelineStage.backward_one_chunk
    weight = PipelineStage.backward_weight_one_chunk

    def run_forward(self, chunk, *args, **kwargs):
        log.append(("F", self.stage_index, chunk))
        return forward(self, chunk, *args, **kwargs)

    def run_backward(self, chunk, loss=None, full_backward=True, last_backward=False):
        log.append(("B" if full_backward else "I", self.stage_index, chunk))
        return backward(self, chunk, loss, full_backward, last_backward)

    def run_weight(self, chunk, last_backward=False):
        log.append(("W", self.stage_index, chunk))
        return weight(self, chunk, last_backward)

    model = {**tiny.MODEL, "num_hidden_layers": 2 * pp}
    program = tiny.make_program(pp, zero=0, pp=pp, schedule=schedule, model=model)
    with mock.patch.multiple(
        PipelineStage,
        forward_one_chunk=run_forward,
        backward_one_chunk=run_backward,
        backward_weight_one_chunk=run_weight,
    ):
        program.run([tiny.batch(seed) for seed in range(num_micro)], tiny.torch.tensor(8.0 * num_micro))
    return log


def idle_share(logs, stages_per_rank):
    """Every rank runs its log in order, as early as its inputs are there. F, I and W of a rank's blocks take 1, B takes 2."""
    cost = {kind: ticks / stages_per_rank for kind, ticks in (("F", 1), ("B", 2), ("I", 1), ("W", 1))}
    last = max(stage for log in logs for _, stage, _ in log)
    done, clocks, heads = {}, [0.0] * len(logs), [0] * len(logs)

    def inputs(kind, stage, chunk):
        if kind == "F":
            return [("F", stage - 1, chunk)] if stage else []
        if kind == "W":
            return [("I", stage, chunk)]
        return [("F", stage, chunk)] + ([("G", stage + 1, chunk)] if stage < last else [])

    while any(head < len(log) for head, log in zip(heads, logs)):
        before = sum(heads)
        for rank, log in enumerate(logs):
            while heads[rank] < len(log) and all(need in done for need in inputs(*log[heads[rank]])):
                kind, stage, chunk = log[heads[rank]]
                start = max([clocks[rank], *(done[need] for need in inputs(kind, stage, chunk))])
                clocks[rank] = done[kind, stage, chunk] = start + cost[kind]
                if kind in "BI":
                    done["G", stage, chunk] = clocks[rank]
                heads[rank] += 1
        assert sum(heads) > before, "the log waits for itself"
    busy = sum(cost[kind] for log in logs for kind, _, _ in log)
    return 1 - busy / (len(logs) * max(clocks))


def most_kept(log, of=None):
    """Micro-batches whose activations a rank holds at once, at most: from their forward to the end of their backward. `of`: of
    that stage alone."""
    held, most = 0, 0
    for kind, stage, _ in log:
        if of in (None, stage):
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[kind]
        most = max(most, held)
    return most


@pytest.mark.parametrize(("pp", "num_micro"), [(2, 4), (3, 6)])
def test_idle_time_is_the_theory_s_and_schedules_rank_as_it_says(ranks, pp, num_micro):
    idle = {}
    for schedule, kind in KINDS.items():
        logs = ranks.run(pp, executed, pp, schedule, num_micro)
        per_stage = num_micro * (3 if kind.splits else 2)
        assert {len(log) for log in logs} <= set(
            range(kind.stages_per_rank * num_micro * 2, kind.stages_per_rank * per_stage + 1)
        )
        idle[schedule] = idle_share(logs, kind.stages_per_rank)
        if not kind.splits:
            for stage, owner in enumerate(owners(schedule, pp)):
                assert most_kept(logs[owner], stage) == in_flight(schedule, pp, stage, num_micro), (schedule, stage)
        if schedule == "gpipe":
            assert [most_kept(log) for log in logs] == [num_micro] * pp
        elif schedule == "1f1b":
            assert [most_kept(log) for log in logs] == [pp - rank for rank in range(pp)]
        elif schedule == "interleaved-1f1b":
            assert [most_kept(log) for log in logs] == [3 * pp - 1 - 2 * rank for rank in range(pp)]
    assert idle["gpipe"] == pytest.approx((pp - 1) / (num_micro + pp - 1))
    assert idle["1f1b"] == pytest.approx((pp - 1) / (num_micro + pp - 1))
    assert idle["interleaved-1f1b"] == pytest.approx((pp - 1) / (2 * num_micro + pp - 1))
    for schedule in (
        "interleaved-zero-bubble",
        "zbv",
    ):  # what is left is the start: the last rank waits for its first input
        assert idle[schedule] == pytest.approx((pp - 1) / (6 * num_micro + pp - 1))
