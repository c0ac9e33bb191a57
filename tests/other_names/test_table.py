"""Other tools' names are refused with our settings, and those are settings that a recipe takes."""

import re

import pytest

from tests.hall.test_config import TREE
from windlass.adapters.config import AdapterConfig
from windlass.config import check_recipe
from windlass.errors import UserError
from windlass.objectives.config import ObjectiveConfig
from windlass.optim.config import OptimConfig
from windlass.other_names.answers import other_names
from windlass.other_names.spellings import WORDS, policy_of
from windlass.other_names.table import TABLE
from windlass.parallel.config import ParallelConfig
from windlass.precision.config import POLICIES, PrecisionConfig
from windlass.recipe import apply_override

EIGHT_PER_NODE = "parallel.replicate=-1 parallel.shard=8"
STRATEGIES = {
    "FULL_SHARD": "parallel.zero=3 parallel.shard=-1",
    "SHARD_GRAD_OP": "parallel.zero=2 parallel.shard=-1",
    "HYBRID_SHARD": f"parallel.zero=3 {EIGHT_PER_NODE}",
    "_HYBRID_SHARD_ZERO2": f"parallel.zero=2 {EIGHT_PER_NODE}",
    "NO_SHARD": "parallel.zero=0",
}


def refused_layout(given, section="parallel"):
    """The message about `given`; the settings it names are put in, and must be a config that is taken."""
    with pytest.raises(UserError) as caught:
        check_recipe(TREE | {section: given})
    tree = {"parallel": {}}
    for override in re.findall(r"parallel\.\w+=[\w-]+", caught.value.change):
        apply_override(tree, override)
    ParallelConfig(**tree["parallel"])
    return caught.value


@pytest.mark.parametrize("key", ["zero", "strategy", "sharding_strategy", "fsdp_sharding_strategy", "fsdp"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_sharding_by_name_is_answered_with_ours(key, name):
    error = refused_layout({key: name})
    assert error.given == f"parallel.{key}={name}"
    assert error.change.startswith(f"use {STRATEGIES[name]}"), error.change
    assert "another tool's name" in error.rule


@pytest.mark.parametrize(
    ("word", "zero"),
    [
        ("stage-3", 3),
        ("ZeRO-2", 2),
        ("zero1", 1),
        ("stage 0", 0),
        ("deepspeed_stage_3", 3),
        ("3", 3),
        ("fsdp", 3),
        ("ddp", 0),
    ]
    + [("ShardingStrategy.SHARD_GRAD_OP", 2), ("full_shard", 3), ("hybrid-shard-zero2", 2), ("HSDP", 3)],
)
def test_common_spellings_are_known(word, zero):
    assert f"parallel.zero={zero}" in refused_layout({"zero": word}).change


def test_a_number_in_quotes_is_shown_with_them():
    assert refused_layout({"zero": "3"}).given == 'parallel.zero="3"'


@pytest.mark.parametrize("number", range(1, 6))
def test_numbers_are_those_of_torchs_enumeration(number):
    from torch.distributed.fsdp import ShardingStrategy

    assert STRATEGIES[ShardingStrategy(number).name] in refused_layout({"fsdp_sharding_strategy": number}).change


@pytest.mark.parametrize(
    ("given", "change"),
    [
        ({"reshard_after_forward": True}, "use parallel.zero=3"),
        ({"fsdp_reshard_after_forward": False}, "use parallel.zero=2"),
        ({"cpu_offload": True}, "use parallel.offload=true"),
        ({"fsdp_offload_params": False}, "use parallel.offload=false"),
        ({"zero_stage": 2}, "use parallel.zero=2"),
        ({"bucket_cap_mb": 50}, "use parallel.zero=0 parallel.bucket_mib=50"),
        ({"gradient_checkpointing": True}, "use parallel.recompute=full"),
        ({"mixed_precision": "bf16"}, "use precision.policy=bf16"),
        ({"min_num_params": 1_000_000}, "remove it: a unit is a block; or use parallel.blocks_per_unit"),
        ({"use_orig_params": True}, "remove it: FSDP2 keeps every parameter by its own name"),
        (
            {"zero": "SHARD_GRAD_OP", "cpu_offload": True},
            "use parallel.zero=2 parallel.shard=-1; parallel.offload=true",
        ),
    ],
)
def test_other_settings_have_ours(given, change):
    assert refused_layout(given).change == change


def test_a_whole_section_of_another_tool():
    section = {
        "sharding_strategy": "FULL_SHARD",
        "cpu_offload": False,
        "mixed_precision": "bf16",
        "use_orig_params": True,
    }
    error = refused_layout(section, "fsdp")
    assert error.given.startswith("fsdp.sharding_strategy=FULL_SHARD; fsdp.cpu_offload=false")
    assert error.change.startswith(
        "use parallel.zero=3 parallel.shard=-1; parallel.offload=false; precision.policy=bf16"
    )
    assert refused_layout("full_shard", "fsdp").change == "use parallel.zero=3 parallel.shard=-1"
    assert refused_layout("full_shard auto_wrap", "fsdp").change == "use parallel.zero=3 parallel.shard=-1"
    both = "use parallel.zero=3 parallel.shard=-1 parallel.offload=true"
    assert refused_layout("full_shard auto_wrap offload", "fsdp").change == both
    assert "its keys: windlass keys parallel" in refused_layout({"mystery": 1}, "fsdp").change


@pytest.mark.parametrize(
    ("section", "word", "change"),
    [
        ("optim", "adamw_torch", "use optim.kind=adamw"),
        ("optim", "Muon", "use optim.kind=muon"),
        (
            "model",
            "gpt2",
            "use model={preset: gpt2} for a preset (windlass keys model lists them), or model={from: gpt2} for a",
        ),
        (
            "data",
            "text.txt",
            "use data.sources=[{path: text.txt}] for files, or [{hub: text.txt}] for a dataset of the hub",
        ),
    ],
)
def test_a_section_as_one_word_is_answered_with_the_key_that_takes_it(section, word, change):
    recipe = {"run": {"directory": "run"}, "model": {"preset": "gpt2-124m"}, section: word}
    with pytest.raises(UserError) as caught:
        check_recipe(recipe)
    error = caught.value
    assert f"{section}: {word}" in error.given and change in f"{error.change}{error.rule}{error.given}"


@pytest.mark.parametrize(
    ("key", "word", "change"),
    [
        ("sources", "texts/a.txt", "use data.sources=[{path: texts/a.txt}] for files"),
        ("tokenizer", "gpt2", "use data.tokenizer={from: gpt2}, or {train: 8192}"),
    ],
)
def test_sources_and_tokenizer_as_one_word_are_answered_with_the_key_that_takes_it(key, word, change):
    with pytest.raises(UserError) as caught:
        check_recipe(TREE | {"data": {**TREE["data"], key: word}})
    assert caught.value.given == f"data.{key}: {word}" and change in caught.value.change


def test_a_name_that_is_nobodys_is_left_to_the_check_of_keys():
    with pytest.raises(ValueError, match="Extra inputs"):
        ParallelConfig(shards=3)
    with pytest.raises(ValueError, match="zero"):
        ParallelConfig(zero="most")


# ---- precision


@pytest.mark.parametrize(
    ("given", "change"),
    [
        ({"fp8": True}, "use precision.policy=fp8"),
        ({"fp8": False}, "remove it: precision.policy alone says it"),
        ({"float8": {"enable_fsdp_float8_all_gather": True}}, "use precision.policy=fp8"),
        ({"precision": {"fp8": True}}, "use precision.policy=fp8"),
    ],
)
def test_a_switch_for_fp8_is_answered_by_its_value(given, change):
    assert change in refused_precision(given).change


def refused_precision(recipe):
    """The message about a recipe with that much in it; the settings it names must be taken."""
    with pytest.raises(UserError) as caught:
        check_recipe(TREE | recipe)
    for key, value in re.findall(r"precision\.(\w+)=([\w-]+)", caught.value.change):
        PrecisionConfig(**{"policy": "bf16"} | {key: value})
    return caught.value


@pytest.mark.parametrize(
    ("word", "policy"),
    [
        ("bf16-mixed", "bf16"),
        ("16-mixed", "fp16"),
        ("32-true", "fp32"),
        ("bf16-true", "bf16-pure"),
        ("64-true", "fp64"),
        ("tf32", "fp32 (whether"),
        ("mixed_bf16", "bf16"),
        ("amp_bf16", "bf16"),
        ("BF16", "bf16"),
        ("torch.bfloat16", "bf16"),
        ("float16", "fp16"),
        ("float32", "fp32"),
        (16, "fp16"),
        (32, "fp32"),
        ("16-true", "fp16 (weights stay in fp32"),
        ("fp8-mixed", "fp8"),
        (False, "fp32"),
    ],
)
def test_a_precision_by_another_tools_name_is_answered_with_ours(word, policy):
    error = refused_precision({"precision": {"policy": word}})
    assert error.given == f"precision.policy={str(word).lower() if word is False else word}"
    assert f"{error.change} ".startswith(f"use precision.policy={policy}"), error.change
    assert "fp64, fp32, bf16, fp16, bf16-pure" in error.rule
    assert refused_precision({"precision": word}).change == error.change


@pytest.mark.parametrize(
    ("recipe", "given", "change"),
    [
        ({"bf16": True}, "bf16=true", "use precision.policy=bf16"),
        ({"fp16": True}, "fp16=true", "use precision.policy=fp16"),
        (
            {"fp16": False, "bf16": True},
            "fp16=false; bf16=true",
            "use precision.policy=bf16; remove fp16: precision.policy alone says it",
        ),
        ({"bf16": {"enabled": True}}, "bf16={enabled: true}", "use precision.policy=bf16"),
        ({"precision": {"mixed_precision": "fp16"}}, "precision.mixed_precision=fp16", "use precision.policy=fp16"),
        ({"mixed_precision": "no"}, "mixed_precision=no", "use precision.policy=fp32"),
        ({"precision": {"bf16": True}}, "precision.bf16=true", "use precision.policy=bf16"),
        ({"precision": {"mixed_precision_param": "bfloat16"}}, "precision.mixed_p", "use precision.parameters=bf16"),
        ({"precision": {"mixed_precision_reduce": "float32"}}, "precision.mixed_p", "use precision.reduce=fp32"),
        ({"parallel": {"mixed_precision": "fp16"}}, "parallel.mixed_precision=fp16", "use precision.policy=fp16"),
    ],
)
def test_keys_of_other_tools_have_ours(recipe, given, change):
    error = refused_precision(recipe)
    assert error.given.startswith(given) and error.change.startswith(change), error


def test_our_own_names_and_words_that_are_nobodys_are_left_to_the_check_of_keys():
    for policy in ("fp64", "fp32", "bf16", "fp16", "bf16-pure", "fp8", "best"):
        assert list(other_names({"precision": {"policy": policy, "reduce": "bf16"}}, tuple(POLICIES))) == []
    assert policy_of("best") is None
    assert {policy.split()[0] for policy in WORDS.values()} == {"fp64", "fp32", "bf16", "fp16", "bf16-pure", "fp8"}
    with pytest.raises(UserError, match=r"precision\.policy='best'"):
        check_recipe({"precision": {"policy": "best"}})


def test_every_row_names_what_is_ours_and_no_key_of_ours_is_refused():
    assert len({(row.section, word) for row in TABLE for word in row.words.split()}) == sum(
        len(row.words.split()) for row in TABLE
    )
    for row in TABLE:
        value = "bf16" if "precision" in row.words else "none" if row.words == "bias" else "dora" not in row.words
        for word in row.words.split():
            if word in ("zero", "stage", "kind", "loss"):  # these have words of other tools
                continue
            ((keys, error),) = other_names({row.section: {word: value}}, tuple(POLICIES))
            assert keys == [f"{row.section}.{word}"] and f"{keys[0]}=" in error.given and f"({row.tool})" in error.rule
            assert re.match(
                r"remove it: |use (parallel\.|precision\.|adapter\.|optim\.|data\.|objective\.)", error.change
            )
    ours = {"parallel": ParallelConfig().model_dump(), "precision": {"policy": "bf16", "states": "bf16"}}
    assert list(other_names(ours, tuple(POLICIES))) == []


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"lora_r": 16}, "adapter.rank=16"),
        ({"adapter": {"r": 8}}, "adapter.rank=8"),
        ({"lora_alpha": 32}, "adapter.alpha=32"),
        ({"adapter": {"target_modules": ["q_proj", "v_proj"]}}, "adapter.targets=[q_proj, v_proj]"),
        ({"lora_target": "q_proj,v_proj"}, "adapter.targets=[q_proj, v_proj]"),
        ({"lora_target": "all"}, "adapter.targets=all-linear"),
        ({"lora_target_linear": True}, "adapter.targets=all-linear"),
        ({"modules_to_save": ["lm_head"]}, 'adapter.also_train=["*lm_head*"]'),
        ({"load_in_4bit": True}, "adapter.base=nf4"),
        (
            {"adapter": {"target_modules": r".*\.(q|v)_proj"}},
            "adapter.targets=[q_proj, v_proj] (what the expression finds",
        ),
        ({"adapter": {"target_modules": r".*\.1\..*"}}, "adapter.targets=[q_proj, v_proj] (for example; regular"),
        ({"adapter": "qlora"}, "adapter.kind=lora adapter.base=nf4"),
        ({"adapter": {"kind": "qlora"}}, "adapter.kind=lora adapter.base=nf4"),
        ({"adapter": {"bias": "none"}}, "remove it: biases stay frozen"),
        ({"adapter": "lora"}, "adapter.kind=lora"),
        ({"finetuning_type": "full"}, "adapter.kind=none"),
        ({"use_rslora": True}, "adapter.rank_stabilized=true"),
        ({"loraplus_lr_ratio": 16}, 'optim.groups=[{names: ["*lora_B*"], learning_rate_scale: 16}]'),
        ({"cutoff_len": 2048}, "data.sequence_length=2048"),
        ({"data": {"max_seq_length": 2048}}, "data.sequence_length=2048"),
        ({"sample_packing": True}, "data.packing=best-fit"),
        ({"stage": "sft"}, "objective.kind=sft"),
        ({"train_on_inputs": False}, "remove it: of a source"),
        ({"stage": "dpo"}, "objective.kind=dpo"),
        ({"rl": "ipo"}, "objective.kind=dpo objective.loss=ipo"),
        ({"rl": "orpo"}, "objective.kind=dpo objective.loss=orpo"),
        ({"rl": "simpo"}, "objective.kind=dpo objective.loss=simpo"),
        ({"objective": {"loss_type": ["sigmoid"]}}, "objective.kind=dpo objective.loss=sigmoid"),
        ({"pref_beta": 0.2}, "objective.kind=dpo objective.beta=0.2"),
        ({"dpo_label_smoothing": 0.1}, "objective.loss=robust objective.label_smoothing=0.1"),
        ({"simpo_gamma": 0.5}, "objective.loss=simpo objective.target_margin=0.5"),
        ({"ref_model": "base"}, "remove it: the reference is the model that the run begins with"),
        ({"objective": {"kind": "ipo"}}, "objective.kind=dpo objective.loss=ipo"),
        ({"objective": {"kind": "dpo", "loss": "dpo"}}, "objective.loss=sigmoid, which is DPO's"),
    ],
    ids=str,
)
def test_finetuning_by_other_tools_names(given, ours):
    """The message names settings that a recipe takes."""
    ((path, error),) = other_names(given, tuple(POLICIES))
    assert f"use {ours}" in error.change or ours in error.change, error.change
    assert path and "another tool's name" in error.rule
    tree = {}
    for override in re.findall(r"(?:adapter|optim|data|objective)\.\w+=(?:\[.*\]|[\w.-]+)", error.change):
        apply_override(tree, override)
    ObjectiveConfig.model_validate({"kind": "dpo", **tree.get("objective", {})})
    adapter = AdapterConfig.model_validate({"kind": "lora", **tree.get("adapter", {})})
    OptimConfig.model_validate({"learning_rate": 1e-3, **tree.get("optim", {})})
    assert adapter.kind in ("lora", "none") and tree.keys() <= {"adapter", "optim", "data", "objective"}


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (
            {"objective": {"kind": "kto"}},
            "KTO is not in this version: it learns from single answers marked good or bad",
        ),
        ({"objective": {"kind": "GRPO"}}, "GRPO is not in this version: it samples answers during training"),
        ({"rl": "ppo"}, "PPO is not in this version: it samples answers"),
        ({"stage": "rm"}, "reward models are not in this version: they end in a head of one output"),
        (
            {"objective": {"kind": "dpo", "loss": "cpo"}},
            "CPO is not in this version, which has other losses on pairs",
        ),
    ],
    ids=str,
)
def test_objectives_that_are_not_here_say_why_and_what_is(given, rule):
    ((_, error),) = other_names(given, tuple(POLICIES))
    assert error.rule.startswith(rule) and "another tool" not in error.rule
    assert error.change.startswith("use objective.kind=dpo on pairs (`format: preference`;")
    assert error.change.endswith("or objective.kind=sft on good answers alone")


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"use_dora": True}, "DoRA is not in this version: it also trains a magnitude"),
        ({"adapter": {"use_dora": True}}, "DoRA is not in this version"),
        ({"adapter": {"kind": "lora", "dora": True}}, "DoRA is not in this version"),
        ({"adapter": {"kind": "DoRA", "rank": 8}}, "DoRA is not in this version"),
        ({"adapter": "dora"}, "DoRA is not in this version"),
        ({"adapter": {"kind": "ia3"}}, "IA3 is not in this version, which has LoRA's factors alone"),
        ({"finetuning_type": "oft"}, "OFT is not in this version"),
        (
            {"adapter": {"kind": ["lora", "lora"]}},
            "several adapters in one run are not in this version: a matrix carries one",
        ),
        ({"adapter": [{"kind": "lora"}, {"kind": "lora"}]}, "several adapters in one run are not in this version"),
    ],
    ids=str,
)
def test_adapters_that_are_not_here_are_refused_by_name(given, rule):
    with pytest.raises(UserError) as caught:
        check_recipe(TREE | given)
    assert caught.value.rule.startswith(rule) and caught.value.change.startswith("use adapter.kind=lora"), caught.value


def test_without_dora_there_is_nothing_to_write():
    ((_, error),) = other_names({"use_dora": False}, tuple(POLICIES))
    assert error.change == "remove it: factors are plain LoRA" and "another tool's name" in error.rule
