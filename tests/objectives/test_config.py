"""The section `objective` of a recipe: what each setting belongs to, and what the rest of a recipe does not allow."""

import pytest
from pydantic import ValidationError

from windlass.config import check_recipe
from windlass.errors import UserError
from windlass.objectives.config import ObjectiveConfig

PAIRS = {"path": "pairs.jsonl", "format": "preference"}
TREE = {
    "run": {"directory": "runs/x", "steps": 4, "tokens_per_step": 64, "micro_batch": 2},
    "model": {"from": "base"},
    "data": {"sources": [PAIRS], "tokenizer": {"from": "base"}, "directory": "data", "sequence_length": 16},
    "objective": {"kind": "dpo"},
    "optim": {"warmup_steps": 1},
}


def test_defaults():
    assert ObjectiveConfig().kind == "pretrain" and not ObjectiveConfig().has_reference
    dpo = ObjectiveConfig(kind="dpo")
    assert dpo.preference_loss == "sigmoid" and dpo.has_reference
    assert not any(ObjectiveConfig(kind="dpo", loss=loss).has_reference for loss in ("simpo", "orpo"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "pretrain", "beta": 0.1}, "objective.beta with objective.kind=pretrain"),
        ({"kind": "sft", "loss": "ipo", "beta": 1}, "objective.loss, objective.beta with objective.kind=sft"),
        ({"kind": "dpo", "loss": "robust"}, "loss=robust without objective.label_smoothing"),
        ({"kind": "dpo", "label_smoothing": 0.1}, "label_smoothing=0.1 with objective.loss=sigmoid"),
        ({"kind": "dpo", "loss": "ipo", "target_margin": 1.0}, "target_margin=1 with objective.loss=ipo"),
    ],
)
def test_a_setting_without_effect_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        ObjectiveConfig(**given)


@pytest.mark.parametrize(
    "given",
    [{"beta": 0}, {"beta": -1}, {"label_smoothing": 0.5, "loss": "robust"}, {"loss": "simpo", "target_margin": -0.1}],
)
def test_values_out_of_range_are_refused(given):
    with pytest.raises(ValidationError):
        ObjectiveConfig(kind="dpo", **given)


def changed(**sections):
    return check_recipe({name: {**TREE.get(name, {}), **sections.get(name, {})} for name in {**TREE, **sections}})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"sources": [{"path": "a.txt"}]}}, "objective.kind=dpo, and .* has `format: text`"),
        ({"evaluate": {"sets": {"other": {"path": "a.txt"}}}}, "dpo, and evaluate.sets.other has `format: text`"),
        ({"run": {"micro_batch": 1}}, r"run.micro_batch=1 with objective.kind=dpo(.|\n)*run.micro_batch=2"),
        ({"data": {"order": {"first_epoch": "written"}}}, "dpo with data.order.first_epoch=written"),
        ({"objective": {"kind": "sft"}}, "sft, and .* has `format: preference`"),
    ],
)
def test_what_the_rest_of_a_recipe_does_not_allow(sections, message):
    with pytest.raises(UserError, match=message):
        changed(**sections)


@pytest.mark.parametrize(
    ("sections", "keeps"),
    [
        ({}, True),
        ({"adapter": {"kind": "lora"}}, False),
        ({"adapter": {"kind": "lora", "from": "there"}}, True),
        ({"adapter": {"kind": "lora", "also_train": ["*norm*"]}}, True),
        ({"adapter": {"kind": "lora"}, "run": {"start_from": "there"}}, True),
        ({"objective": {"loss": "simpo"}}, False),
        ({"objective": {"loss": "orpo"}}, False),
    ],
)
def test_scores_are_kept_unless_the_run_begins_as_its_base(sections, keeps):
    assert changed(**sections).keeps_reference is keeps


def test_a_growing_corpus_can_be_trained_on_beside_an_adapter_that_begins_at_its_base():
    changed(data={"order": {"first_epoch": "written"}}, adapter={"kind": "lora"})


def test_a_sample_of_pairs_is_two_sequences():
    config = changed(run={"micro_batch": 4})
    assert config.sequences_per_step == 4 and config.samples_per_step == 2
