"""A recipe resolved: its length in steps, the model it gets, and what is refused before the first step."""

import json

import pytest

from tests.jobs import tiny
from windlass.data.prepare import prepare
from windlass.errors import UserError
from windlass.jobs.assemble import shape_of, with_steps
from windlass.jobs.ready import check_model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("assemble")


@pytest.fixture(scope="module")
def prepared(base):
    config = tiny.recipe(base)
    return prepare(config.data, config.evaluate.sets, report=lambda sentence: None)


@pytest.mark.parametrize(("length", "steps"), [({"tokens": 1281}, 11), ({"tokens": 1280}, 10), ({"epochs": 2.0}, None)])
def test_a_length_in_tokens_or_epochs_becomes_whole_steps(base, prepared, length, steps):
    resolved = with_steps(tiny.recipe(base, run={"steps": None, **length}), prepared)
    if steps is None:
        steps = -(-2 * prepared.sets["train"].samples // 8)
    assert resolved.run.steps == steps
    assert (resolved.run.tokens, resolved.run.epochs) == (None, None)


def test_the_vocabulary_and_the_end_of_text_come_from_the_tokenizer(base, prepared):
    architecture = shape_of(tiny.recipe(base), prepared)
    assert (architecture.vocab_size, architecture.padded_vocab_size) == (300, 384)
    assert architecture.eos_token_id == prepared.eos_id


def test_a_sequence_longer_than_the_model_is_refused(base, prepared):
    config = tiny.recipe(base, model={"max_position_embeddings": 8})
    with pytest.raises(UserError, match=r"data.sequence_length=16 for a model of 8 positions"):
        check_model(config, shape_of(config, prepared))


def test_epochs_are_held_against_the_warm_up_too(base, prepared):
    config = tiny.recipe(base, run={"steps": None, "epochs": 0.1}, optim={"warmup_steps": 500})
    with pytest.raises(UserError, match=r"optim.warmup_steps=500 in a run of"):
        with_steps(config, prepared)


def test_the_run_directory_holds_recipe_resolved_settings_and_the_first_event(run):
    from windlass.config import check_recipe
    from windlass.recipe import parse_yaml

    resolved = (run / "resolved.yaml").read_text()
    assert "# layout: replicate 1 x shard 2, zero 3" in resolved and "# global batch: 8 sequences = 1" in resolved
    assert check_recipe(parse_yaml(resolved, "resolved.yaml")).run.steps == tiny.STEPS, "it loads as a recipe again"
    assert (run / "recipe.yaml").exists() and (run / "logs" / "rank-1.log").exists()
    first = json.loads((run / "events.jsonl").read_text().splitlines()[0])
    assert (first["kind"], first["step"]) == ("start", 0)
    assert first["derived"]["parameters"].endswith("(16,184)")
    assert first["baselines"] == {}, "6 sequences are not the set that they are fitted for"
    assert first["provenance"]["hosts"]


def test_a_checkpoint_holds_what_makes_it_sufficient_elsewhere(run):
    newest = run / "checkpoints" / f"step-{tiny.STEPS:08d}"
    names = {path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file()}
    assert {"resolved.yaml", "provenance.json", "tokenizer/tokenizer.json", "capsule.json", "MANIFEST"} <= names
    provenance = json.loads((newest / "provenance.json").read_text())
    assert {"argv", "hosts", "packages", "git", "python"} <= provenance.keys()
