"""The line that tells the layout of a run, and how its pipeline is cut."""

from unittest import mock

import pytest

from tests import tiny
from windlass.errors import UserError
from windlass.parallel import schedules
from windlass.training.layout import describe_layout
from windlass.training.preflight import make_ready

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def line(base, blocks=2, **parallel):
    config = tiny.recipe(base, parallel=parallel, model={"num_hidden_layers": blocks, **HEADS})
    return describe_layout(config, config.parallel.layout(4), config.model.architecture(300), 4)


def test_the_line_names_the_axes_the_blocks_of_each_rank_and_the_idle_share(tmp_path):
    assert line(tmp_path, shard=4) == "replicate 1 x shard 4, zero 3"
    assert line(tmp_path, context=2) == "replicate 1 x shard 2 x context 2, zero 3, allgather"
    told = line(tmp_path, context=2, tp=2, context_kind="ulysses")
    assert told == "replicate 1 x shard 1 x context 2 x tp 2, zero 3, ulysses"
    assert line(tmp_path, tp=2, shard=2) == "replicate 1 x shard 2 x tp 2, zero 3"
    assert line(tmp_path, pp=2, tp=2).startswith("pp 2 x replicate 1 x shard 1 x tp 2, zero 1; 1f1b, blocks 0 | 1; ")
    assert line(tmp_path, pp=2) == "pp 2 x replicate 1 x shard 2, zero 1; 1f1b, blocks 0 | 1; idle 20.0% of a step"
    told = line(tmp_path, blocks=5, pp=2, zero=0, schedule="zbv")
    assert told == (
        "pp 2 x replicate 2 x shard 1, zero 0; zbv, blocks 0, 4 | 1, 2-3; 1f1b would be idle for 20.0% of a step"
    )


@pytest.mark.parametrize(
    ("given", "said", "remedy"),
    [
        (
            {"context": 3, "context_kind": "ulysses"},
            "data.sequence_length=16 with parallel.context=3",
            {"context": 3, "context_kind": "ulysses", "length": 18},
        ),
        (
            {"context": 2, "context_kind": "ulysses"},
            "parallel.context=2 with parallel.context_kind=ulysses for a model of 3 query heads",
            {"context": 2},
        ),
    ],
)
def test_rows_that_context_ranks_cannot_share_are_refused_before_data_is_prepared(tmp_path, given, said, remedy):
    def ready(context, length=16, **parallel):
        sizes = {"data": {"sequence_length": length}, "run": {"tokens_per_step": 8 * length}}
        config = tiny.recipe(tmp_path, parallel={"context": context, **parallel}, **sizes)
        make_ready(config, context, "cpu")

    with pytest.raises(UserError) as caught:
        ready(**given)
    assert said in caught.value.given and not (tmp_path / "data").exists()
    ready(**remedy)


@pytest.mark.parametrize(
    ("given", "said", "remedy"),
    [
        (
            {"parallel": {"pp": 4, "schedule": "gpipe"}},
            "a model of 2 blocks",
            {"parallel": {"pp": 2, "schedule": "gpipe"}},
        ),
        (
            {"parallel": {"pp": 2, "shard": 1}, "run": {"tokens_per_step": 16}},
            "1 micro-batch per step with parallel.pp=2 and parallel.schedule=1f1b",
            {"parallel": {"pp": 2, "shard": 1}, "run": {"tokens_per_step": 32}},
        ),
    ],
)
def test_a_pipeline_that_cannot_run_is_refused_before_data_is_prepared(tmp_path, given, said, remedy):
    config = tiny.recipe(tmp_path, **given)
    with pytest.raises(UserError) as caught:
        make_ready(config, config.parallel.pp, "cpu")
    assert said in caught.value.given and not (tmp_path / "data").exists()
    named = [f"{section}.{key}={value}" for section, keys in remedy.items() for key, value in keys.items()]
    assert any(setting in caught.value.change for setting in named)
    make_ready(tiny.recipe(tmp_path, **remedy), 2, "cpu")


def test_a_schedule_that_this_torch_cannot_run_is_refused_before_data_is_prepared(tmp_path):
    config = tiny.recipe(tmp_path, model={"num_hidden_layers": 4}, parallel={"pp": 2, "schedule": "zbv"})
    old = mock.patch.object(schedules.importlib.metadata, "version", lambda _: "2.11.0")
    with old, pytest.raises(UserError, match=r"torch 2\.11\.0"):
        make_ready(config, 2, "cpu")
    assert not (tmp_path / "data").exists()
