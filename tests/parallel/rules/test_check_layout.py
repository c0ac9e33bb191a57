"""One call checks every rule on a layout, lists all violations, and runs once per recipe and once per start."""

import sys
from collections import Counter

import pytest

from tests import tiny
from windlass.errors import SeveralErrors, UserError
from windlass.model.config import ModelConfig
from windlass.parallel.config import ParallelConfig
from windlass.parallel.rules.check_layout import OtherSettings, check_layout, layout_errors
from windlass.training.loop import train

SIZES = {"vocab_size": 150, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
MODEL = ModelConfig(family="qwen3", **HEADS, **SIZES).architecture()


def refused(parallel, *args, **kwargs):
    with pytest.raises(UserError) as caught:
        check_layout(ParallelConfig(**parallel), *args, **kwargs)
    return caught.value


def test_every_violation_is_listed_with_its_rule_and_its_change():
    error = refused({"tp": 16, "prefetch": 3, "context_kind": "ulysses"}, MODEL, 3)
    assert isinstance(error, SeveralErrors)
    assert [one.given for one in error.errors] == [
        "parallel.context_kind=ulysses with parallel.context=1",
        "parallel.tp=16 for a model of 8 query heads and 40 channels of the MLP",
        "parallel.prefetch=3 for 2 units of 1 blocks",
        "parallel.tp=16, parallel.replicate=1, parallel.shard=-1 on 3 ranks",
    ]
    assert error.given == "; ".join(one.given for one in error.errors)
    one = error.errors[1]
    assert str(error).splitlines()[2] == f"  {one.given}: {one.rule}; {one.change}"


def test_one_violation_is_raised_as_itself():
    error = refused({"tp": 16}, MODEL)
    assert type(error) is UserError and error.change == "use parallel.tp=1 or 2 or 4 or 8"


def test_a_length_waits_for_a_model_that_can_be_cut():
    others = OtherSettings(sequence_length=30)
    assert refused({"tp": 16}, MODEL, others=others).given.startswith("parallel.tp=16 for a model of 8 query heads")
    assert refused({"tp": 4}, MODEL, others=others).given == "data.sequence_length=30 with parallel.tp=4"
    short = ModelConfig(family="qwen3", max_position_embeddings=20, **HEADS, **SIZES).architecture()
    error = refused({"tp": 4}, short, others=others)
    assert [one.given.partition(" with ")[0] for one in error.errors] == [
        "data.sequence_length=30 for a model of 20 positions",
        "data.sequence_length=30",
    ]
    error = refused({"tp": 16}, short, others=others)
    assert [one.given.partition(" with ")[0] for one in error.errors] == [
        "parallel.tp=16 for a model of 8 query heads and 40 channels of the MLP",
        "data.sequence_length=30 for a model of 20 positions",
    ], "the positions that the model has do not wait"
    error = refused({"tp": 4, "zero": 1, "pp": 9, "schedule": "1f1b"}, MODEL, others=others)
    assert "data.sequence_length=30 with parallel.tp=4" in [one.given for one in error.errors], "nor for other mistakes"


def test_a_world_brings_the_ranks_of_experts_and_the_batch():
    others = OtherSettings(sequence_length=8, tokens_per_step=24)
    check_layout(ParallelConfig(), MODEL, 3, others)
    assert refused({}, MODEL, 2, others=others).given.startswith("run.tokens_per_step=24 (3 sequences) on 2 ranks")
    assert refused({"expert": 2}, None, 3).given == "parallel.expert=2 with parallel.shard=3"
    check_layout(ParallelConfig(expert=2))  # which may run on 2


def test_a_contradiction_of_axes_hides_the_world_only():
    assert refused({"replicate": 0, "tp": 3}, MODEL, 5).given.count(";") == 1


COUNTED = ("layout_errors", "degree_errors", "head_errors", "check_drift", "rules_of")
OF_DATA = ("load_prepared", "open_prepared", "check_shards", "check_small_files", "read_shard_index")


def calls_of(function):
    """How often each of COUNTED and, in data/, of OF_DATA is called in this process while `function` runs. A generator's frame
    is one call."""
    frames = set()

    def profile(frame, event, _argument):
        code = frame.f_code
        names, room = (OF_DATA, "/windlass/data/") if code.co_name in OF_DATA else (COUNTED, "/windlass/")
        if event == "call" and code.co_name in names and room in code.co_filename:
            frames.add(frame)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return Counter(frame.f_code.co_name for frame in frames)


def test_a_resume_checks_its_layout_once_when_loaded_and_once_when_all_is_known_and_opens_its_data_once(tmp_path):
    train(tiny.recipe(tmp_path, run={"steps": 3}))

    def resume():
        train(tiny.recipe(tmp_path, run={"steps": 5}))

    counts = calls_of(resume)
    assert {name: counts[name] for name in ("layout_errors", "degree_errors", "head_errors")} == {
        "layout_errors": 2,
        "degree_errors": 2,
        "head_errors": 2,
    }
    assert counts["check_drift"] == 3, (
        "before anything is made, once the data is known, and of the checkpoint that is read"
    )
    assert counts["rules_of"] == 3, "once to refuse, once to train, once for the facts of the start"
    assert {name: counts[name] for name in OF_DATA} == {
        **dict.fromkeys(OF_DATA, 1),
        "read_shard_index": 2,  # of the training set and of the validation set
    }, "the data is opened once, to be prepared, and handed over"


def test_gradients_are_added_in_bf16_on_one_process_alone():
    others = OtherSettings(adds_in_bf16=True)
    check_layout(ParallelConfig(), world=1, others=others)
    with pytest.raises(UserError) as caught:
        check_layout(ParallelConfig(), world=2, others=others)
    assert (
        caught.value.given == "precision.gradients=bf16 on 2 ranks" and "precision.reduce=bf16" in caught.value.change
    )


def test_a_step_of_half_sequences_is_named_once_on_any_number_of_ranks():
    others = OtherSettings(sequence_length=16, tokens_per_step=40)
    for world in (None, 3):
        error = refused({}, MODEL, world, others)
        assert error.given == "run.tokens_per_step=40 with data.sequence_length=16", (
            "how they divide over ranks is not asked of it"
        )
    error = refused({"replicate": -1, "shard": 1}, None, None, others)
    assert error.change == "the nearest that divide: run.tokens_per_step=32 or 48", (
        "an axis of -1 has one rank at least"
    )


def test_experts_that_zero_0_keeps_on_every_rank_are_not_divided_over_them():
    (error,) = list(layout_errors(ParallelConfig(expert=2, zero=0), None, 3, OtherSettings()))
    assert "zero" in error.given, "the one violation is that of zero 0, and none of 2 experts' ranks among 3"


def test_what_the_torch_of_this_host_lacks_is_asked_here_alone(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda _package: "2.11.0")
    for older, given in [
        ({"pp": 2, "schedule": "zbv"}, "parallel.schedule=zbv with torch 2.11.0"),
        ({"context": 2, "context_kind": "ulysses", "compile": True},
         "parallel.context_kind=ulysses with parallel.compile=true and torch 2.11.0"),
    ]:  # fmt: skip
        check_layout(ParallelConfig(**older))
        assert refused(older, here=True).given == given
