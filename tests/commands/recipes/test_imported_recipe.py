"""What a recipe says of the tool that its file is from: settings by the tool's own defaults, each with its reason."""

import pytest

from tests.commands.recipes.test_import_recipe import AXOLOTL, FACTORY, TUNE_FILE, of
from windlass.commands.recipes.imported_recipe import Imported
from windlass.config import parse_recipe

TUNE = {**TUNE_FILE, "dataset": {"_component_": "torchtune.datasets.chat_dataset", "source": "a/b"}}
FULL = {**FACTORY, "finetuning_type": "full"}


def imported(given):
    return of(given, "torchtune" if "checkpointer" in given else None)


def loaded(found):
    return parse_recipe(found.text("file.yaml"), "file.yaml")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (AXOLOTL, "no val_set_size: axolotl holds nothing out"),
        ({**AXOLOTL, "val_set_size": 0.0}, "val_set_size: 0.0: axolotl holds nothing out"),
        (FACTORY, "no val_size: LLaMA-Factory holds nothing out"),
        (TUNE, "no dataset_val: torchtune holds nothing out"),
    ],
    ids=str,
)
def test_nothing_is_held_out_where_the_tool_does_not(given, why):
    """2 % of the rows were, and were not trained on."""
    found = imported(given)
    assert loaded(found).data.validation == "none"
    assert f"# data.validation=none: {why}\n" in found.text("file.yaml")


def test_a_number_of_rows_is_named():
    found = of({**AXOLOTL, "val_set_size": 500})
    assert (
        "val_set_size: 500",
        "data.validation is a share, an amount in bytes or tokens, or a source; the recipe has 0.02",
    ) in (found.left)
    assert loaded(found).data.validation == 0.02


def test_axolotls_sets_to_test_on_are_validation():
    sets = [{"path": "test.jsonl", "type": "completion"}, {"path": "more.jsonl", "type": "completion"}]
    found = of({**AXOLOTL, "test_datasets": sets})
    assert loaded(found).data.validation.path == "test.jsonl"
    assert ("validation on more.jsonl", "one set is data.validation; further ones are evaluate.sets") in found.left
    assert not any("data.validation" in setting for setting, _ in found.assumed)


@pytest.mark.parametrize(
    ("given", "policy", "why"),
    [
        ({**AXOLOTL, "bf16": False}, "fp32", "neither bf16 nor fp16 is on: axolotl"),
        ({**AXOLOTL, "bf16": None, "fp16": None}, "fp32", "neither bf16 nor fp16 is on: axolotl"),
        (AXOLOTL, "auto", "no bf16: axolotl has bf16 where the device has it"),
        ({**AXOLOTL, "bf16": False, "fp16": True}, "fp16", None),
        ({**AXOLOTL, "bf16": True}, "bf16", None),
        (FULL, "fp32", "neither bf16, fp16 nor pure_bf16 is on: LLaMA-Factory trains in fp32"),
        ({**FULL, "bf16": False}, "fp32", "neither bf16, fp16 nor pure_bf16 is on"),
        ({**FULL, "pure_bf16": True}, "bf16-pure", None),
        (FACTORY, "auto", "LLaMA-Factory has the base in its own dtype"),
        ({**TUNE, "dtype": None}, "fp32", None),
        ({**TUNE, "dtype": "bf16"}, "bf16-pure", None),
    ],
    ids=str,
)
def test_it_computes_in_what_the_tool_computes_in(given, policy, why):
    found = imported(given)
    assert loaded(found).precision.policy == policy
    said = [reason for setting, reason in found.assumed if setting.startswith("precision")]
    assert len(said) == (why is not None) and (why is None or why in said[0])


@pytest.mark.parametrize(("more", "seed"), [({"seed": 7}, 7), ({"seed": None}, 0), ({}, 0)])
def test_torchtunes_seed(more, seed):
    """7 was called a key without a counterpart, and the run had seed 0."""
    found = imported({**TUNE, **more})
    assert loaded(found).run.seed == found.tree["run"]["seed"] == seed
    assert not any("seed" in key for key, _ in found.left)


def test_the_floor_is_theirs_also_beside_a_schedule_that_is_not_here():
    assert of({**AXOLOTL, "lr_scheduler": "polynomial"}).tree["optim"]["floor"] == 0


def test_a_recipe_has_comments_alone_where_there_is_something_to_say():
    found = Imported("axolotl", {"run": {"steps": 5}})
    assert found.text("a.yaml").splitlines()[1:] == ["run: {steps: 5}"]
