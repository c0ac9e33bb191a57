"""What a pipeline refuses, with remedies that work."""

from unittest import mock

import pytest

from windlass.errors import UserError
from windlass.parallel.config import ParallelConfig
from windlass.parallel.rules import pipeline
from windlass.parallel.rules.check_layout import check_layout
from windlass.parallel.rules.pipeline import empty_stage_errors, micro_batch_errors, schedule_errors
from windlass.parallel.rules.schedules import KINDS


@pytest.mark.parametrize(("schedule", "pp", "blocks", "fits"), [("1f1b", 4, 3, 3), ("zbv", 4, 7, 3), ("zbv", 8, 5, 2)])
def test_fewer_blocks_than_stages_name_the_largest_pipeline(schedule, pp, blocks, fits):
    (error,) = empty_stage_errors(schedule, pp, blocks)
    assert f"parallel.pp={fits} or less" in error.change
    assert ("schedule=1f1b" in error.change) == (KINDS[schedule].stages_per_rank == 2 and blocks >= pp)
    assert not [*empty_stage_errors(schedule, fits, blocks), *empty_stage_errors(schedule, 1, 1)]


def test_a_pipeline_of_one_rank_has_no_less():
    (error,) = empty_stage_errors("interleaved-1f1b", 2, 3)
    assert error.change == "use parallel.schedule=1f1b, which has one stage per rank, or parallel.pp=1"


@pytest.mark.parametrize(
    ("schedule", "pp", "num_micro", "micro", "tokens", "other_micro"),
    [
        ("1f1b", 4, 3, 1, 4 * 100, None),
        ("1f1b", 4, 2, 2, 4 * 200, 1),
        ("interleaved-1f1b", 4, 6, 1, 8 * 100, None),
        ("interleaved-1f1b", 4, 6, 4, 8 * 400, 3),
        ("interleaved-zero-bubble", 3, 5, 3, 6 * 300, 1),
    ],
)
def test_micro_batches_that_do_not_fit_are_refused_with_those_that_do(
    schedule, pp, num_micro, micro, tokens, other_micro
):
    (error,) = micro_batch_errors(schedule, pp, num_micro, 100 * micro, micro)
    change = error.change
    assert f"{num_micro} micro-batches" in error.given and f"run.tokens_per_step={tokens}" in change
    assert not list(micro_batch_errors(schedule, pp, tokens // (100 * micro), 100 * micro, micro))
    assert (f"run.micro_batch={other_micro}" in change) == (other_micro is not None)
    if other_micro:
        assert not list(
            micro_batch_errors(schedule, pp, num_micro * micro // other_micro, 100 * other_micro, other_micro)
        )
    assert not list(micro_batch_errors("gpipe", pp, num_micro, 100 * micro, micro))
    assert not list(micro_batch_errors(schedule, 1, num_micro, 100 * micro, micro))


def test_a_backward_cut_in_two_needs_a_torch_that_can():
    for version, refused in (("2.11.0", True), ("2.12.1+cpu", True), ("2.13.0", False), ("3.0.0a0", False)):
        with mock.patch.object(pipeline.importlib.metadata, "version", lambda _, v=version: v):
            for schedule, kind in KINDS.items():
                assert not list(schedule_errors(schedule, 1))
                given = [error.given for error in schedule_errors(schedule, 2)]
                assert given == [f"parallel.schedule={schedule} with torch {version}"] * (refused and kind.splits)


@pytest.mark.parametrize(
    ("given", "said", "remedy"),
    [
        ({"schedule": "zbv"}, "schedule=zbv with parallel.pp=1", {"schedule": "zbv", "pp": 2}),
        ({"pp": 2, "zero": 3}, "zero=3 with parallel.pp=2", {"pp": 2, "zero": 2}),
        ({"pp": 2, "zero": 3, "schedule": "zbv"}, "zero=3 with parallel.pp=2", {"pp": 2, "zero": 1, "schedule": "zbv"}),
        ({"pp": 2, "shard": 2, "prefetch": 1}, "prefetch=1", {"pp": 2, "shard": 2, "offload": True}),
        (
            {"pp": 2, "schedule": "zbv", "recompute": "selective", "activation_gib": 1.0},
            "recompute=selective",
            {"pp": 2, "recompute": "selective", "activation_gib": 1.0},
        ),
        ({"pp": 2, "schedule": "zbv", "compile": True}, "compile=true", {"pp": 2, "compile": True}),
        (
            {"pp": 2, "schedule": "interleaved-zero-bubble", "recompute": "selective"},
            "recompute=selective",
            {"pp": 2, "recompute": "selective"},
        ),
    ],
)
def test_settings_that_a_pipeline_cannot_have_are_refused_by_name(given, said, remedy):
    with pytest.raises(UserError) as caught:
        check_layout(ParallelConfig(**given))
    assert f"parallel.{said}" in caught.value.given
    check_layout(ParallelConfig(**remedy))
