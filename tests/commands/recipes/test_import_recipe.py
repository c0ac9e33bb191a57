"""Recipes of axolotl, LLaMA-Factory and torchtune: each key that maps by its value, each that does not by its name."""

from pathlib import Path

import pytest
import yaml

from windlass.commands.recipes.import_recipe import import_recipe
from windlass.config import parse_recipe
from windlass.data.sources.config import SourceConfig
from windlass.data.sources.shape_config import SHARED_ROLES
from windlass.errors import UserError

DPO = "saves/qwen3-4b/full/dpo"
FILES = Path(__file__).parent / "foreign"
TUNE = "/tmp/torchtune/llama3_2_1B/lora_single_device"
ALPACA, SHAREGPT, TALKS = (
    {"format": "chat", "rows": shape} for shape in ("alpaca", "sharegpt", {"messages": "conversations"})
)
# file -> the recipe, whole
EXPECTED = {
    "axolotl-qlora": {
        "run": {"seed": 42, "tokens_per_step": 4 * 2 * 2048, "micro_batch": 4, "epochs": 3, "directory": "./outputs/qlora-out"},
        "model": {"from": "NousResearch/Llama-3.2-1B"},
        "data": {
            "isolate": True,
            "sources": [
                {"hub": "mhenrichsen/alpaca_2k_test", "format": "chat", "rows": "alpaca", "too_long": "drop"},
                {"path": "chats/train.jsonl", **TALKS, "too_long": "drop"},
            ],
            "tokenizer": {"from": "NousResearch/Llama-3.2-1B"},
            "directory": "last_run_prepared",
            "validation": 0.1,
            "sequence_length": 2048,
        },
        "objective": {"kind": "sft"},
        "adapter": {
            "kind": "lora", "base": "nf4", "rank": 32, "alpha": 16, "dropout": 0.05,
            "targets": ["gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"],
        },
        "parallel": {"recompute": "full"},
        "precision": {"policy": "auto"},
        "optim": {
            "warmup_steps": 10, "learning_rate": 2e-4, "schedule": "cosine", "floor": 0.0, "weight_decay": 0, "beta2": 0.999,
        },
        "report": {"sinks": ["wandb"], "project": "notes", "every_steps": 1},
    },
    "axolotl-full-dpo": {
        "run": {"seed": 7, "tokens_per_step": 2 * 4 * 1024 * 2, "micro_batch": 4, "steps": 500, "directory": "./outputs/dpo"},
        "model": {"from": "Qwen/Qwen2.5-0.5B"},
        "data": {
            "validation": "none",
            "sources": [
                {
                    "hub": "Intel/orca_dpo_pairs",
                    "split": "train",
                    "format": "preference",
                    "too_long": "drop",
                    "rows": {"prompt": "question", "system": "system"},
                }
            ],
            "tokenizer": {"from": "Qwen/Qwen2.5-0.5B"},
            "directory": "./outputs/dpo-data",
            "sequence_length": 1024,
        },
        "objective": {"kind": "dpo", "beta": 0.2},
        "parallel": {"zero": 3},
        "precision": {"policy": "bf16"},
        "optim": {
            "warmup_steps": 50, "learning_rate": 5e-7, "schedule": "linear", "floor": 0.0, "weight_decay": 0, "beta2": 0.999,
        },
        "checkpoint": {"every_steps": 100, "keep_last": 3},
        "report": {"every_steps": 5},
    },
    "llama-factory-lora": {
        "run": {"seed": 42, "tokens_per_step": 8 * 2048, "micro_batch": 1, "epochs": 3, "directory": "saves/llama3-8b/lora/sft"},
        "model": {"from": "meta-llama/Meta-Llama-3-8B-Instruct"},
        "data": {
            "isolate": True,
            "sources": [
                {"path": "data/identity.json", "file_format": "jsonl", **ALPACA, "too_long": "drop"},
                {"path": "data/alpaca_en_demo.json", "file_format": "jsonl", **ALPACA, "too_long": "drop"},
            ],
            "tokenizer": {"from": "meta-llama/Meta-Llama-3-8B-Instruct"},
            "directory": "saves/llama3-8b/lora/sft-data",
            "validation": 0.1,
            "sequence_length": 2048,
        },
        "objective": {"kind": "sft"},
        "adapter": {"rank": 8, "alpha": 16, "kind": "lora", "targets": "all-linear"},
        "precision": {"policy": "bf16"},
        "optim": {"learning_rate": 1e-4, "schedule": "cosine", "floor": 0.0, "weight_decay": 0, "beta2": 0.999},
        "checkpoint": {"every_steps": 500},
        "evaluate": {"every_steps": 500},
        "report": {"every_steps": 10},
    },
    "llama-factory-full-dpo": {
        "run": {"seed": 42, "tokens_per_step": 2 * 1024 * 2, "micro_batch": 2, "steps": 100, "directory": DPO},
        "model": {"from": "Qwen/Qwen3-4B"},
        "data": {
            "validation": "none",
            "sources": [
                {"path": "data/dpo_en_demo.json", "file_format": "jsonl", "format": "preference", "too_long": "drop"}
            ],
            "tokenizer": {"from": "Qwen/Qwen3-4B"},
            "directory": f"{DPO}-data",
            "sequence_length": 1024,
        },
        "objective": {"kind": "dpo", "beta": 0.1, "loss": "sigmoid"},
        "adapter": {"kind": "none"},
        "parallel": {"zero": 3, "recompute": "full"},
        "precision": {"policy": "bf16"},
        "optim": {"warmup_steps": 5, "learning_rate": 5e-6, "schedule": "constant", "weight_decay": 0, "beta2": 0.999},
    },
    "torchtune-lora": {
        "run": {"seed": 7, "tokens_per_step": 4 * 8 * 4096, "micro_batch": 4, "epochs": 1, "directory": TUNE},
        "model": {"from": "/tmp/Llama-3.2-1B-Instruct/"},
        "data": {
            "isolate": True,
            "validation": "none",
            "sources": [{"path": "data/chats.json", "file_format": "jsonl", **TALKS, "too_long": "drop"}],
            "tokenizer": {"from": "/tmp/Llama-3.2-1B-Instruct/"},
            "directory": f"{TUNE}-data",
            "sequence_length": 4096,
        },
        "objective": {"kind": "sft"},
        "adapter": {
            "kind": "lora", "rank": 64, "alpha": 128,
            "targets": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        },
        "parallel": {"compile": False},
        "precision": {"policy": "bf16"},
        "optim": {
            "warmup_steps": 100, "learning_rate": 3e-4, "schedule": "cosine", "floor": 0.0, "weight_decay": 0.01,
            "beta2": 0.999,
        },
        "report": {"every_steps": 1},
    },
    "torchtune-full": {
        "run": {
            "seed": 0, "tokens_per_step": 2 * 2048, "micro_batch": 2, "steps": 100,
            "directory": "/tmp/torchtune/qwen2_5_1_5B/full",
        },
        "model": {"from": "/tmp/Qwen2.5-1.5B"},
        "data": {
            "isolate": True,
            "packing": "best-fit",
            "validation": "none",
            "sources": [{"hub": "allenai/c4", "split": "train", "text": "body"}],
            "tokenizer": {"from": "/tmp/Qwen2.5-1.5B"},
            "directory": "/tmp/torchtune/qwen2_5_1_5B/full-data",
            "sequence_length": 2048,
        },
        "parallel": {"recompute": "full", "compile": True},
        "precision": {"policy": "bf16-pure"},
        "optim": {"warmup_steps": 0, "learning_rate": 2e-5, "schedule": "constant", "weight_decay": 0.01, "beta2": 0.999},
        "report": {"sinks": ["wandb"], "project": "tune"},
    },
}  # fmt: skip
LEFT = {
    "axolotl-qlora": {
        "special_tokens": "a tokenizer that has them",
        "optimizer paged_adamw_8bit": "never 8 bits",
        "evals_per_epoch": "evaluate.every_steps",
        "saves_per_epoch": "checkpoint.every_steps",
    },
    "axolotl-full-dpo": {},
    "llama-factory-lora": {
        "template": "chat template of data.tokenizer.from",
        "warmup_ratio": "follows from the data",
        "max_samples": "documents: N",
        "dataset: identity": "data/identity.json",
        "dataset: alpaca_en_demo": "data/alpaca_en_demo.json",
    },
    "llama-factory-full-dpo": {
        "template": "chat template of data.tokenizer.from",
        "use_swanlab": "no key of this version",
        "rows of dpo_en_demo (alpaca)": "rows are pairs here",
        "dataset: dpo_en_demo": "no dataset_info.json describes it",
    },
    "torchtune-lora": {
        "log_peak_memory_stats": "the report has the curves",
        "clip_grad_norm": "optim.max_norm is 1.0",
    },
    "torchtune-full": {"optimizer PagedAdamW8bit": "never 8 bits", "clip_grad_norm": "optim.max_norm is 1.0"},
}


def of(given, tool=None, ranks=1, **more):
    return import_recipe(given, "file.yaml", tool=tool, ranks=ranks, **more)


def read(name):
    return yaml.safe_load((FILES / f"{name}.yaml").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_whole_file_becomes_a_recipe_that_loads(name):
    given = read(name)
    found = of(given)
    text = found.text(f"{name}.yaml")
    recipe = yaml.safe_load(text)
    assert {section: recipe[section] for section in recipe} == EXPECTED[name]
    parse_recipe(text, name)
    assert len(found.left) == len(LEFT[name])
    for (key, reason), (expected, words) in zip(found.left, LEFT[name].items(), strict=True):
        assert key.startswith(expected) and words in reason
        assert f"# {key}: {reason}" in text


AXOLOTL = {"base_model": "a/b", "datasets": [{"path": "x.jsonl", "type": "completion", "field": "body"}]}
FACTORY = {"model_name_or_path": "a/b", "dataset": "mine", "stage": "sft", "lora_rank": 4}


@pytest.mark.parametrize("keys", [("fp8", "bf16"), ("bf16", "fp8"), ("fp16", "fp8"), ("fp8", "fp16")])
def test_fp8_comes_before_16_bits_in_whatever_order(keys):
    found = of({**AXOLOTL, **dict.fromkeys(keys, True)})
    assert found.tree["precision"] == {"policy": "fp8"}


def test_the_batch_is_of_all_ranks():
    given = {**AXOLOTL, "micro_batch_size": 3, "gradient_accumulation_steps": 5, "sequence_len": 64}
    assert of(given, ranks=8).tree["run"]["tokens_per_step"] == 3 * 5 * 8 * 64


def test_texts_with_a_column_are_texts():
    tree = of({**AXOLOTL, "datasets": [*AXOLOTL["datasets"], "org/texts"]}).tree
    assert (
        tree["data"]["sources"] == [{"path": "x.jsonl", "text": "body"}, {"hub": "org/texts"}]
        and "objective" not in tree
    )


def test_keys_of_a_dataset_that_were_not_taken_are_named():
    names = {"role": "who", "content": "said"}
    entry = {"path": "org/m", "type": "chat_template", "field_messages": "talk", "message_property_mappings": names}
    more = {
        "roles_to_train": ["assistant"],
        "shards": 10,
        "ds_type": "json",
        "chat_template": "chatml",
        "revision": "v1",
    }
    found = of({**AXOLOTL, "datasets": [{**entry, **more}], "max_steps": 5})
    assert found.tree["data"]["sources"] == [
        {"hub": "org/m", "revision": "v1", "format": "chat", "rows": {"messages": "talk", **names}, "too_long": "drop"}
    ]
    assert [given for given, _ in found.left] == [
        "roles_to_train of org/m: ['assistant']", "shards of org/m: 10", "chat_template of org/m: chatml",
    ]  # fmt: skip


def test_arguments_of_torchtunes_optimizer_and_schedule_that_were_not_taken_are_named():
    tune = yaml.safe_load((FILES / "torchtune-full.yaml").read_text())
    tune |= {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-5, "fused": True, "betas": [0.9, 0.95]}}
    tune |= {"lr_scheduler": {"_component_": "cosine", "num_warmup_steps": 5, "num_cycles": 0.5}}
    left = [given for given, _ in of(tune).left]
    assert {"optimizer.betas: [0.9, 0.95]", "lr_scheduler.num_cycles: 0.5"} <= set(left)
    assert not any("fused" in given or "_component_" in given for given in left)


def test_a_warm_up_in_steps_comes_before_a_share_of_them():
    found = of({**FACTORY, "warmup_steps": 7, "warmup_ratio": 0.1})
    assert found.tree["optim"]["warmup_steps"] == 7
    assert "warmup_ratio: 0.1 (warmup_steps comes before it)" in found.silent


OF_SHAREGPT = {
    "messages": "conversations",
    "role": "from",
    "content": "value",
    "roles": SHARED_ROLES,
    "system": "system",
}


@pytest.mark.parametrize(
    ("info", "rows"),
    [
        ({"columns": {"prompt": "question", "system": "system"}}, {"prompt": ["question"], "system": "system"}),
        ({}, "alpaca"),
        ({"columns": {"chosen": "good"}}, {"prompt": ["instruction", "input"], "system": "system", "chosen": "good"}),
        ({"formatting": "sharegpt", "columns": {"messages": "conversations", "chosen": "chosen"}}, "sharegpt"),
        ({"formatting": "sharegpt", "columns": {"rejected": "bad"}}, {**OF_SHAREGPT, "rejected": "bad"}),
    ],
    ids=str,
)
def test_pairs_of_llama_factory_are_read_where_they_are(info, rows):
    """With the chat template, as there: a question is a message of the user."""
    found = of({**FACTORY, "stage": "dpo"}, datasets={"mine": {"file_name": "m.jsonl", "ranking": True, **info}})
    assert found.left == [] and found.tree["data"]["sources"][0]["rows"] == rows
    SourceConfig.model_validate(found.tree["data"]["sources"][0])


@pytest.mark.parametrize(
    ("entry", "rows"),
    [
        ({"type": "chatml.intel"}, {"prompt": "question", "system": "system"}),
        ({"type": "llama3.icr"}, {"prompt": "input", "system": "system"}),
        ({"type": "chatml.prompt_pairs"}, {"prompt": "prompt", "system": "system"}),
        ({"type": "chatml.ultra"}, None),
        ({"type": "chat_template.argilla_chat"}, None),
        ({"type": "chat_template.default"}, "messages"),
        (
            {"type": "chat_template.default", "field_messages": "talk", "field_chosen": "good"},
            {"messages": "talk", "chosen": "good"},
        ),
        (
            {"type": "chat_template", "message_property_mappings": {"role": "who"}, "field_rejected": "rejected"},
            {"messages": "messages", "role": "who"},
        ),
        ({"type": "zephyr.nectar"}, "named"),
    ],
    ids=str,
)
def test_pairs_of_axolotl_are_read_where_they_are(entry, rows):
    found = of({**AXOLOTL, "rl": "dpo", "warmup_steps": 5, "datasets": [{"path": "org/pairs", **entry}]})
    (source,) = found.tree["data"]["sources"]
    assert source.get("rows") == (None if rows == "named" else rows)
    assert [given for given, _ in found.left] == (["rows of org/pairs (zephyr.nectar)"] if rows == "named" else [])
    SourceConfig.model_validate(source)


@pytest.mark.parametrize(
    ("more", "warmup"),
    [
        ({"max_steps": 1000}, 30),
        ({"max_steps": 9000}, 100),
        ({"max_steps": 1000, "warmup_ratio": 0.2}, 200),
        ({}, None),
    ],
)
def test_axolotls_warm_up_is_3_percent_where_none_is_given(more, warmup):
    found = of({**AXOLOTL, **more})
    assert found.tree["optim"].get("warmup_steps") == warmup
    assert [given for given, _ in found.left] == ([] if more else ["warmup_ratio: 0.03"])


def test_an_entry_of_several_files_is_several_sources():
    entry = {"path": "json", "data_files": ["a.jsonl", "b.jsonl"], "type": "chat_template"}
    sources = of({**AXOLOTL, "datasets": [entry]}).tree["data"]["sources"]
    assert [source["path"] for source in sources] == ["a.jsonl", "b.jsonl"]


def test_keys_with_nothing_to_set_are_named_too():
    found = of({**AXOLOTL, "trust_remote_code": True, "relora": False})
    assert found.silent == ["trust_remote_code: true", "relora: false"] and len(found.left) == 1  # and the warm-up
    assert "# Nothing to set here for: trust_remote_code: true, relora: false\n" in found.text("file.yaml")


ODD = (float("inf"), float("nan"), -1, 1 << 80, True, "text", [], [[]], {}, {1: None}, "${output_dir}", "a: [")


@pytest.mark.parametrize("name", EXPECTED)
def test_any_value_of_any_key_imports_or_is_refused(name):
    """No value of a foreign file ends in a traceback."""
    whole = read(name)
    outcomes = {"imported": 0, "refused": 0}
    for key in whole:
        for value in ODD:
            try:
                found = of({**whole, key: value, 7: value}, datasets={"mine": value})
                assert yaml.safe_load(found.text(name))["model"]["from"]
                outcomes["imported"] += 1
            except UserError:
                outcomes["refused"] += 1
    assert outcomes["imported"] > len(whole) and outcomes["refused"] > len(ODD)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"adapter": "lora"}, {"kind": "lora", "targets": ["q_proj", "v_proj"]}),
        (
            {"adapter": "lora", "load_in_4bit": True, "lora_target_linear": True},
            {"base": "nf4", "targets": "all-linear"},
        ),
        ({"adapter": "lora", "lora_modules_to_save": ["embed_tokens"]}, {"also_train": ["*embed_tokens*"]}),
        ({"adapter": "lora", "peft_use_rslora": True}, {"rank_stabilized": True}),
    ],
)
def test_adapters(more, expected):
    adapter = of({**AXOLOTL, **more}).tree["adapter"]
    assert {key: adapter[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"adapter": "lora", "peft_use_dora": True}, "DoRA is not in this version"),
        ({"load_in_8bit": True}, "in four bits"),
        ({"optimizer": "lion"}, "the recipe has adamw"),
        ({"lr_scheduler": "polynomial"}, "the recipe has cosine"),
        ({"deepspeed": "my.json"}, "parallel.zero"),
        ({"chat_template": "llama3"}, "chat template of data.tokenizer.from"),
        ({"plugins": ["liger"]}, "no key of this version"),
    ],
)
def test_what_this_version_has_not_is_named(more, reason):
    assert [why for _, why in of({**AXOLOTL, **more}).left if reason in why]


@pytest.mark.parametrize(("stage", "objective"), [("pt", "pretrain"), ("sft", "sft"), ("dpo", "dpo")])
def test_stages_of_llama_factory(stage, objective):
    info = {"mine": {"file_name": "m.jsonl", "formatting": "sharegpt", "ranking": stage == "dpo"}}
    tree = of({**FACTORY, "stage": stage}, datasets=info).tree
    assert tree["objective"] == {"kind": objective}
    kinds = {"pt": None, "sft": "chat", "dpo": "preference"}
    assert tree["data"]["sources"][0].get("format") == kinds[stage]


@pytest.mark.parametrize(
    ("given", "tool", "words"),
    [
        ([], None, "holds list"),
        ({"run": {}, "model": {}}, None, "has the keys run, model"),
        (AXOLOTL, "axolotle", "--tool axolotle"),
        ({"datasets": [{"path": "x"}], "base_model": None}, "axolotl", "names no model (base_model)"),
        ({"base_model": "a/b"}, "axolotl", "names no data"),
        ({**AXOLOTL, "micro_batch_size": "two"}, None, "micro_batch_size: 'two'"),
        ({**AXOLOTL, "micro_batch_size": 1.5}, None, "micro_batch_size: 1.5"),
        ({**AXOLOTL, "num_epochs": float("inf")}, None, "num_epochs: inf"),
        ({**AXOLOTL, "num_epochs": True}, None, "num_epochs: True"),
        ({**AXOLOTL, "base_model": ["a/b"]}, None, "base_model: ['a/b']"),
        ({**AXOLOTL, "datasets": [{"type": "alpaca"}]}, None, "datasets: {'type': 'alpaca'}"),
    ],
)
def test_a_file_that_cannot_be_one_is_refused(given, tool, words):
    with pytest.raises(UserError) as caught:
        of(given, tool)
    assert words in caught.value.given


TUNE_FILE = {"checkpointer": {"checkpoint_dir": "/m"}, "tokenizer": {}, "model": {}, "loss": {}}


def tuned(*datasets, **more):
    found = [{**one, "_component_": f"torchtune.datasets.{one['_component_']}"} for one in datasets]
    return of({**TUNE_FILE, "dataset": found[0] if len(found) == 1 else found, **more}, "torchtune")


@pytest.mark.parametrize(
    ("builder", "source"),
    [
        ("alpaca", {"hub": "tatsu-lab/alpaca", "rows": "alpaca"}),
        ("alpaca_cleaned", {"hub": "yahma/alpaca-cleaned", "rows": "alpaca"}),
        ("grammar", {"hub": "liweili/c4_200m"}),
        ("samsum", {"hub": "Samsung/samsum"}),
        ("slimorca", {"hub": "Open-Orca/SlimOrca-Dedup", "rows": "sharegpt"}),
        ("stack_exchange_paired", {"hub": "lvwerra/stack-exchange-paired"}),
        ("hh_rlhf_helpful", {"hub": "RLHFlow/HH-RLHF-Helpful-standard"}),
    ],
)
def test_a_builder_of_torchtunes_is_the_dataset_that_it_loads(builder, source):
    """Each was tatsu-lab/alpaca here. Its rows are named where they are no conversations of a known shape."""
    found = tuned({"_component_": f"{builder}_dataset"})
    assert found.tree["data"]["sources"] == [{**source, "format": "chat", "too_long": "drop"}]
    named = [reason for given, reason in found.left if given == f"rows of {source['hub']} ({builder})"]
    assert [reason[:27] for reason in named] == ([] if "rows" in source else ["rows are conversations here"])
    own = tuned({"_component_": f"{builder}_dataset", "source": "org/mine", "split": "train"})
    assert own.tree["data"]["sources"][0] == {**source, "hub": "org/mine", "split": "train", "format": "chat"} | {
        "too_long": "drop"
    }


def test_articles_of_torchtune_are_texts_of_a_column():
    (source,) = tuned({"_component_": "cnn_dailymail_articles_dataset"}).tree["data"]["sources"]
    assert source == {"hub": "ccdv/cnn_dailymail", "subset": "3.0.0", "text": "article"}


@pytest.mark.parametrize("builder", ["wikitext_dataset", "chat_dataset", "vqa_dataset", "my.own_dataset", ""])
def test_a_builder_whose_data_nobody_names_gives_no_recipe(builder):
    with pytest.raises(UserError) as caught:
        tuned({"_component_": builder, "split": "train"})
    name = builder.rpartition(".")[2] or "the file"
    assert caught.value.given == f"the dataset of {name} has no source"
    assert "alpaca_dataset, alpaca_cleaned_dataset" in caught.value.rule and "dataset.source" in caught.value.change


def test_a_file_of_torchtunes_without_data_gives_no_recipe():
    with pytest.raises(UserError, match=r"the file names no data"):
        of(TUNE_FILE, "torchtune")


def test_data_sets_of_torchtune_in_a_list_are_sources_each():
    """A list was read as no data set at all, and so as alpaca."""
    found = tuned(
        {"_component_": "samsum_dataset"},
        {"_component_": "text_completion_dataset", "source": "org/b", "column": "body", "seed": 3},
    )
    assert [source["hub"] for source in found.tree["data"]["sources"]] == ["Samsung/samsum", "org/b"]
    assert ("dataset.seed: 3", "not read") in found.left


@pytest.mark.parametrize(
    ("given", "key", "rule"),
    [
        ({**AXOLOTL, "rl": "kto"}, "rl: kto", "KTO is not in this version: it learns from single answers"),
        ({**AXOLOTL, "rl": "grpo"}, "rl: grpo", "GRPO is not in this version"),
        ({**AXOLOTL, "rl": "bco"}, "rl: bco", "of another tool's objectives pt, sft, dpo"),
        ({**FACTORY, "stage": "kto"}, "stage: kto", "KTO is not in this version"),
        ({**FACTORY, "stage": "rm"}, "stage: rm", "reward models are not in this version"),
        ({**FACTORY, "stage": "ppo"}, "stage: ppo", "PPO is not in this version"),
        ({**FACTORY, "stage": "dpo", "pref_loss": "kto_pair"}, "pref_loss: kto_pair", "of another tool's objectives"),
        ({**FACTORY, "finetuning_type": "freeze"}, "finetuning_type: freeze", "a run trains all parameters or LoRA's"),
        ({**FACTORY, "finetuning_type": "oft"}, "finetuning_type: oft", "OFT is not in this version"),
        ({**AXOLOTL, "reward_model": True}, "reward_model: true", "reward models are not in this version"),
        (
            {**AXOLOTL, "process_reward_model": True},
            "process_reward_model: true",
            "reward models are not in this version",
        ),
        ({**AXOLOTL, "qat": {"weight_dtype": "int4"}}, "qat: {weight_dtype: int4}", "training with weights rounded"),
        ({**AXOLOTL, "kd_trainer": True}, "kd_trainer: true", "learning from a teacher's outputs"),
        (
            {**AXOLOTL, "plugins": ["a.liger.LigerPlugin", "a.diffusion.DiffusionPlugin"]},
            "plugins: ['a.liger.LigerPlugin', 'a.diffusion.DiffusionPlugin']",
            "a diffusion objective is not in this version",
        ),
        (
            {
                **TUNE_FILE,
                "dataset": {"source": "a/b"},
                "quantizer": {"_component_": "t.q.Int8DynActInt4WeightQATQuantizer"},
            },
            "quantizer: Int8DynActInt4WeightQATQuantizer",
            "training with weights rounded",
        ),
        (
            {**TUNE_FILE, "dataset": {"source": "a/b"}, "teacher_model": {"_component_": "t.models.qwen2.qwen2_1_5b"}},
            "teacher_model: qwen2_1_5b",
            "learning from a teacher's outputs",
        ),
        ({**AXOLOTL, "adapter": "ia3"}, "adapter: ia3", "IA3 is not in this version"),
        ({**AXOLOTL, "adapter": "llama-adapter"}, "adapter: llama-adapter", "a run trains all parameters or LoRA's"),
        (
            {**TUNE_FILE, "dataset": {"source": "a/b"}, "loss": {"_component_": "torchtune.rlhf.loss.RSOLoss"}},
            "loss: RSOLoss",
            "of torchtune's losses cross entropy and DPOLoss are known here",
        ),
    ],
    ids=str,
)
def test_what_would_become_another_technique_gives_no_recipe(given, key, rule):
    """These were a finetune on answers (KTO's bad ones too), of all parameters, or by LoRA, with exit code 0."""
    with pytest.raises(UserError) as caught:
        of(given, "torchtune" if "checkpointer" in given else None)
    assert caught.value.given == key and caught.value.rule.startswith(rule)
    assert "into the file" in caught.value.change or "from the file" in caught.value.change


@pytest.mark.parametrize("loss", ["CEWithChunkedOutputLoss", "CrossEntropyLoss", "LinearCrossEntropyLoss"])
def test_cross_entropy_by_any_name_of_torchtunes_is_the_loss_of_tokens(loss):
    assert (
        "objective"
        not in tuned(
            {"_component_": "text_completion_dataset", "source": "a/b"}, loss={"_component_": f"torch.nn.{loss}"}
        ).tree
    )


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("save_steps", 0.25, "checkpoint.every_steps (it must be a whole number)"),
        ("eval_steps", 0.1, "evaluate.every_steps (it must be a whole number)"),
        ("logging_steps", 0, "report.every_steps (it must be at least 1)"),
        ("max_grad_norm", "none", "optim.max_norm (it must be a number)"),
    ],
)
def test_a_value_that_our_key_does_not_take_is_named_and_the_rest_is_imported(key, value, reason):
    """transformers takes a share of the steps; the recipe was written with it, and refused as a whole."""
    found = of({**AXOLOTL, key: value})
    assert (f"{key}: {value}", reason) in found.left
    parse_recipe(found.text("file.yaml"), "file.yaml")


def test_a_validation_set_of_llama_factory_is_one_of_ours():
    info = {"test": {"file_name": "test.json", "formatting": "sharegpt"}}
    found = of({**FACTORY, "eval_dataset": "test, other"}, datasets=info)
    assert found.tree["data"]["validation"] == {
        "path": "data/test.json", "file_format": "jsonl", "format": "chat", "rows": "sharegpt", "too_long": "drop",
    }  # fmt: skip
    assert ("validation on other", "one set is data.validation; further ones are evaluate.sets") in found.left


@pytest.mark.parametrize(
    ("key", "value", "section", "ours"),
    [
        ("pure_bf16", True, "precision", {"policy": "bf16-pure"}),
        ("dp_shard_size", 4, "parallel", {"shard": 4}),
        ("dp_replicate_size", 2, "parallel", {"replicate": 2}),
    ],
)
def test_names_that_had_no_answer(key, value, section, ours):
    assert of({**FACTORY, key: value}).tree[section] == ours


def test_arguments_of_the_trainer_are_sent_to_init():
    with pytest.raises(UserError, match="name the tool") as caught:
        of({"learning_rate": 1e-4, "max_steps": 10})
    assert "`windlass init`" in caught.value.change


@pytest.mark.parametrize(
    ("keys", "policy"),
    [({"bf16": "auto", "tf32": True}, "auto"), ({"tf32": True, "bf16": True, "fp16": None}, "bf16")],
)
def test_tf32_beside_bf16_is_bf16(keys, policy):
    """It says how products of fp32 are made. Such files, nearly all of axolotl's examples, were imported as fp32."""
    found = of({**AXOLOTL, **keys})
    assert found.tree["precision"] == {"policy": policy}
    assert ("tf32: true", "whether products of fp32 run in TF32 is torch's setting") in found.left


@pytest.mark.parametrize(("given", "steps"), [(0.1, 100), (10, 10)])
def test_a_warm_up_below_1_is_a_share_of_the_steps(given, steps):
    assert of({**AXOLOTL, "max_steps": 1000, "warmup_steps": given}).tree["optim"]["warmup_steps"] == steps


def test_a_value_of_several_lines_is_one_comment():
    found = of({**AXOLOTL, "swanlab_description": "one\n- two\n", "datasets": [{"path": "a/b", "separator": "\n"}]})
    text = found.text("file.yaml")
    assert '# swanlab_description: "one\\n- two\\n": no key of this version does what it does\n' in text
    parse_recipe(text, "file.yaml")


@pytest.mark.parametrize(("more", "shard"), [({}, 4), ({"dp_shard_size": 2}, 8)])
def test_ranks_of_axolotls_experts_are_ranks_that_share_parameters(more, shard):
    parallel = of({**AXOLOTL, "expert_parallel_size": 4, **more}).tree["parallel"]
    assert (parallel["expert"], parallel["shard"]) == (4, shard)


@pytest.mark.parametrize(
    ("split", "ours", "left"),
    [
        ("train", {"split": "train"}, []),
        ("train[:500]", {"split": "train", "documents": 500}, []),
        ("train[:20%]", {"split": "train"}, ["split of a/b: train[:20%]"]),
        ("train[10:20]", {"split": "train"}, ["split of a/b: train[10:20]"]),
    ],
)
def test_a_slice_of_a_split(split, ours, left):
    for found in (
        of({**AXOLOTL, "warmup_steps": 1, "datasets": [{"path": "a/b", "split": split}]}),
        tuned({"_component_": "alpaca_dataset", "source": "a/b", "split": split}, clip_grad_norm=1.0),
    ):
        source = found.tree["data"]["sources"][0]
        assert {key: source[key] for key in ("split", "documents") if key in source} == ours
        assert [given for given, _ in found.left] == left


def test_the_end_of_torchtunes_data_set_is_a_share_and_another_set_is_validation():
    begin, end = ({"_component_": "alpaca_dataset", "split": f"train[{part}]"} for part in (":95%", "95%:"))
    component = "torchtune.datasets.alpaca_dataset"
    share = tuned(begin, dataset_val={**end, "_component_": component})
    assert share.tree["data"]["validation"] == 0.05 and share.tree["data"]["sources"][0]["split"] == "train"
    assert not any("split" in given for given, _ in share.left)
    other = tuned(begin, dataset_val={"_component_": component, "source": "c/d", "split": "test"})
    assert other.tree["data"]["validation"] == {
        "hub": "c/d", "split": "test", "format": "chat", "rows": "alpaca", "too_long": "drop",
    }  # fmt: skip


@pytest.mark.parametrize(("more", "kind"), [({}, "muon"), ({"adapter": "lora"}, None)])
def test_muon_is_ours_where_whole_matrices_are_trained(more, kind):
    assert of({**AXOLOTL, "optimizer": "muon", **more}).tree["optim"].get("kind") == kind
