"""Recipes of LLaMA-Factory's v1 trainer."""

import json

import pytest
import yaml

from tests.commands.recipes.test_import_recipe import of
from windlass.commands.recipes.new_recipe import import_file
from windlass.config import parse_recipe
from windlass.errors import UserError

V1 = {
    "model": "Qwen/Qwen3-4B",
    "model_class": "llm",
    "peft_config": {"name": "lora", "r": 16, "target_modules": "all"},
    "dist_config": {"name": "fsdp2", "dcp_path": None},
    "train_dataset": "data/sets.yaml",
    "output_dir": "outputs/one",
    "micro_batch_size": 2,
    "global_batch_size": 32,
    "max_steps": 10,
}
SETS = {
    "notes": {"path": "data/notes.json", "source": "local", "converter": "alpaca", "size": 500},
    "talks": {"path": "org/talks", "split": "test", "converter": "sharegpt"},
}


def test_sections_defaults_and_data_sets_become_a_recipe_that_loads():
    found = of(V1, ranks=4, datasets=SETS)
    assert found.tree == {
        "run": {"seed": 42, "tokens_per_step": 32 * 2048, "micro_batch": 2, "steps": 10, "directory": "outputs/one"},
        "model": {"from": "Qwen/Qwen3-4B"},
        "data": {
            "sources": [
                {"path": "data/notes.json", "file_format": "jsonl", "format": "chat", "rows": "alpaca", "too_long": "drop"},
                {"hub": "org/talks", "split": "test", "format": "chat", "rows": "sharegpt", "too_long": "drop"},
            ],
            "tokenizer": {"from": "Qwen/Qwen3-4B"},
            "directory": "outputs/one-data",
            "validation": "none",
            "isolate": True,
            "sequence_length": 2048,
        },
        "objective": {"kind": "sft"},
        "adapter": {"kind": "lora", "rank": 16, "alpha": 16, "dropout": 0.05, "targets": "all-linear"},
        "parallel": {"recompute": "full"},
        "precision": {"policy": "bf16"},
        "optim": {"warmup_steps": 0, "learning_rate": 1e-4, "schedule": "constant", "weight_decay": 0.01, "beta2": 0.999},
    }  # fmt: skip
    assert found.left == [("size of notes: 500", "`documents: N` or `rows: first:end` of the source")]
    parse_recipe(found.text("v1.yaml"), "v1.yaml")


@pytest.mark.parametrize(
    ("more", "section", "ours"),
    [
        ({"quant_config": {"name": "bnb", "quantization_bit": 4}}, "adapter", {"base": "nf4"}),
        ({"peft_config": None, "optim_config": {"name": "muon", "wd": 0.1}}, "optim", {"kind": "muon", "weight_decay": 0.1}),
        ({"peft_config": None}, "adapter", {"kind": "none"}),
        ({"lr_scheduler_config": {"name": "linear"}}, "optim", {"schedule": "linear"}),
        ({"dist_config": {"name": "deepspeed", "config_file": "ds_z2_config.json"}}, "parallel", {"zero": 2}),
        ({"cp_size": 2, "mp_shard_size": 4}, "parallel", {"context": 2, "shard": 4}),
        ({"enable_activation_checkpointing": False}, "parallel", {"recompute": "none"}),
        ({"pref_beta": 0.3}, "objective", {"kind": "dpo", "beta": 0.3}),
    ],
    ids=str,
)  # fmt: skip
def test_a_section_says_what_keys_of_the_first_trainer_say(more, section, ours):
    tree = of({**V1, **more}, datasets=SETS).tree
    assert {key: tree[section][key] for key in ours} == ours


def test_a_set_of_pairs_is_dpo_and_rows_that_no_converter_reads_are_named():
    sets = {"pairs": {"path": "org/pairs", "converter": "pair"}, "own": {"path": "own.jsonl", "source": "local"}}
    found = of(V1, datasets=sets)
    assert found.tree["objective"] == {"kind": "dpo"}
    assert [given for given, _ in found.left] == ["rows of own (v1's own)"]


def test_a_set_named_by_itself_is_the_source_and_a_file_of_sets_that_is_absent_is_named():
    alone = of({**V1, "train_dataset": "org/talks"})
    assert alone.tree["data"]["sources"][0]["hub"] == "org/talks"
    absent = of(V1)
    assert absent.tree["data"]["sources"][0]["path"] == "./data/sets.yaml"
    assert (
        absent.left[0][0]
        == "rows of data/sets.yaml (data sets of a file that is not here; of pairs: objective.kind=dpo)"
    )


@pytest.mark.parametrize("name", ["freeze", "oft"])
def test_another_adapter_gives_no_recipe(name):
    with pytest.raises(UserError, match=f"finetuning_type: {name}"):
        of({**V1, "peft_config": {"name": name}})


def test_the_file_of_data_sets_is_read_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/sets.yaml").write_text(yaml.safe_dump(SETS))
    (tmp_path / "v1.yaml").write_text(json.dumps(V1))
    text, found = import_file(tmp_path / "v1.yaml", None, None, 1)
    assert [source.get("rows") for source in yaml.safe_load(text)["data"]["sources"]] == ["alpaca", "sharegpt"]
    assert found.tool == "LLaMA-Factory"
