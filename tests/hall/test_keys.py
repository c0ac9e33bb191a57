"""What `windlass keys` prints, and the schema that editors read: both of what a recipe takes."""

import json

import pytest

from docs.generate.build import DOCS, schema_text
from tests import tiny
from windlass.config import RunConfig
from windlass.errors import UserError
from windlass.keys import describe_keys, schema, sections
from windlass.mistakes import more_of
from windlass.recipe import parse_yaml

RECIPES = sorted((DOCS.parent / "recipes").rglob("*.yaml"))


def test_all_sections_with_their_keys():
    printed = "\n".join(describe_keys(None))
    assert all(f"\n{name} " in f"\n{printed}" for name in RunConfig.model_fields)
    assert "optim.groups" in printed and "learning_rate_scale" in printed
    assert max(map(len, describe_keys(None))) <= 100


def test_a_section_a_key_and_a_key_by_its_last_name():
    lines = describe_keys("checkpoint")
    assert "checkpoint.keep_last: int, at least 1; default 2" in lines and "`" not in lines[0]
    one = describe_keys("optim.learning_rate")
    assert one[0] == "optim.learning_rate: number, above 0; default 0.0003" and len(one) < 10
    assert describe_keys("learning_rate") == one
    assert [
        line.split(":")[0] for line in describe_keys("kind") if line.startswith(("objective.", "adapter.", "optim."))
    ] == [
        "objective.kind",
        "adapter.kind",
        "optim.kind",
    ]


def test_a_name_that_is_none_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"windlass keys optim\.lerning_rate") as caught:
        describe_keys("optim.lerning_rate")
    assert "did you mean `optim.learning_rate`?" in caught.value.change and "`windlass keys`" in caught.value.change


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("optim.lr", "use optim.learning_rate=VALUE; "),
        ("lr", "use optim.learning_rate=VALUE; "),
        ("data.seq_len", "use data.sequence_length=VALUE; "),
        ("lora_r", "use adapter.kind=lora adapter.rank=VALUE; "),
        ("gradient_accumulation_steps", "remove it: accumulation follows from "),
        ("training", "use the section run; "),
    ],
)
def test_another_tools_name_is_answered_with_ours(name, answer):
    with pytest.raises(UserError) as caught:
        describe_keys(name)
    assert caught.value.change.startswith(answer) and caught.value.change.endswith("`windlass keys` lists them all")


def test_the_fields_of_a_family():
    lines = describe_keys("qwen3_moe")
    assert any(one.startswith("model.num_experts: ") for one in lines)
    assert not any(one.startswith("model.preset") for one in lines) and "qwen3_moe" in "\n".join(describe_keys(None))


def test_a_field_of_the_model_is_answered_with_its_families():
    lines = describe_keys("model.num_experts")
    assert lines[0].startswith("model.num_experts: int, at least 1") and any("qwen3_moe" in line for line in lines)
    assert describe_keys("model.hidden_size")[0].startswith("model.hidden_size: ")


@pytest.mark.parametrize(
    ("section", "key"),
    [("data", "sources"), ("run", "steps"), ("model", "hidden_size"), ("optim", "groups"), ("data.tokenizer", "from")],
)
def test_what_a_message_sends_a_reader_to_is_answered(section, key):
    path = (
        more_of(f"{section}.{key}" + "[3].x[0]" * (key == "sources"))
        .removeprefix("`windlass keys ")
        .removesuffix("` explains the key")
    )
    assert describe_keys(path.removesuffix(".x"))


def test_every_key_of_every_section_and_family_is_answered():
    assert all(describe_keys(f"{one.path}.{key.name}") for one in sections() for key in one.keys)


def test_every_key_has_a_meaning():
    assert [f"{one.path}.{key.name}" for one in sections() for key in one.keys if not key.meaning] == []


def errors_of(recipe):
    jsonschema = pytest.importorskip("jsonschema")
    return [
        (list(error.path), error.message) for error in jsonschema.Draft202012Validator(schema()).iter_errors(recipe)
    ]


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_the_schema_takes_our_recipes(file):
    assert errors_of(parse_yaml(file.read_text(), file.name)) == []


def test_the_schema_takes_a_resolved_recipe_with_fields_of_a_family_and_null(tmp_path):
    resolved = tiny.recipe(tmp_path, model={"sliding_window": None}).model_dump(mode="json", by_alias=True)
    resolved["model"].pop("hub_cache", None)
    assert errors_of(resolved) == []


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("optim", "lr", 1e-3),
        ("run", "steps", "many"),
        ("adapter", "rank", 0),
        ("parallel", "zero", 4),
        ("model", "hidden_size", []),
        ("model", "hiden_size", 64),
        ("model", "n_layer", 3),  # of gpt2, and the recipe's family is qwen3
        ("model", "preset", "nope"),
    ],
)
def test_the_schema_refuses_what_a_recipe_may_not_have(tmp_path, section, key, value):
    recipe = json.loads(tiny.recipe(tmp_path).model_dump_json(by_alias=True, exclude_none=True))
    recipe[section][key] = value
    assert errors_of(recipe), (section, key)


def test_the_schema_takes_a_family_of_a_script_and_fields_beside_a_preset(tmp_path):
    recipe = json.loads(tiny.recipe(tmp_path).model_dump_json(by_alias=True, exclude_none=True))
    assert errors_of(recipe | {"model": {"family": "house", "width": 32}}) == []
    assert errors_of(recipe | {"model": {"preset": "gpt2-124m", "n_layer": 3}}) == []
    assert errors_of(recipe | {"model": {"preset": "gpt2-124m", "n_leyer": 3}})


def test_the_file_in_docs_is_the_schema():
    assert (DOCS / "recipe.schema.json").read_text() == schema_text()
