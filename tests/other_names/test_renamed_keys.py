"""Wrong keys in nearly the right place are answered with ours, which exist."""

import copy
import re

import pytest

from tests import tiny
from tests.hall.test_config import TREE
from windlass import mistakes
from windlass.config import RunConfig, check_recipe
from windlass.errors import UserError
from windlass.other_names.renamed_keys import NEARLY
from windlass.recipe import apply_override

WRONG_KEYS = {  # as people write them -> what the answer says
    "optim.lr=1e-4": "use optim.learning_rate=0.0001; ",
    "optim.max_lr=1e-4": "use optim.learning_rate=0.0001; ",
    "optim.warmup=10": "use optim.warmup_steps=10; ",
    "optim.warmup_ratio=0.1": "use optim.warmup_steps, that share of the run's steps; ",
    "optim.scheduler=cosine": "use optim.schedule=cosine; ",
    "optim.min_lr=1e-5": "use optim.floor, as a share of optim.learning_rate; ",
    "optim.name=adamw": "use optim.kind=adamw; ",
    "optim.betas=[0.9, 0.95]": "use optim.beta1 and optim.beta2; ",
    "optim.eps=1e-8": "use optim.epsilon=1e-08; ",
    "optim.grad_clip=1.0": "use optim.max_norm=1.0; ",
    "optim.wd=0.1": "use optim.weight_decay=0.1; ",
    "optim.learningRate=1e-4": "use optim.learning_rate=0.0001; ",
    "parallel.tensor=2": "use parallel.tp=2; ",
    "parallel.tensor_parallel_size=2": "use parallel.tp=2; ",
    "parallel.pipeline=2": "use parallel.pp=2; ",
    "parallel.data=2": "use parallel.replicate=2 parallel.zero=0 (whole copies, DDP) or parallel.shard=2 (ZeRO, FSDP); ",
    "parallel.dp=2": "use parallel.replicate=2 parallel.zero=0 (whole copies, DDP) or parallel.shard=2 (ZeRO, FSDP); ",
    "parallel.sequence=2": "parallel.tp brings sequence parallelism along; parallel.context=2 cuts long sequences; ",
    "parallel.cp=2": "use parallel.context=2; ",
    "parallel.ep=2": "use parallel.expert=2; ",
    "parallel.gpus=4": "use the command: windlass train RECIPE --nproc 4 (all visible GPUs without it; parallel divides them); ",
    "run.nproc=2": "use the command: windlass train RECIPE --nproc 2 (all visible GPUs without it; parallel divides them); ",
    "parallel.num_nodes=2": "use the command: windlass launch nodes RECIPE --nodes 2 (or launch slurm); ",
    "parallel.accelerator=gpu": "remove it: the device is found; ",
    "data.seq_len=64": "use data.sequence_length=64; ",
    "data.path=texts": "use data.sources=[{path: texts}], or hub for path; ",
    "data.val_split=0.1": "use data.validation=0.1; ",
    "data.text_column=body": "use text of an entry of data.sources; ",
    "data.batch_size=8": "use run.tokens_per_step (sequences x data.sequence_length); ",
    "data.learning_rate=1e-4": "did you mean `optim.learning_rate`? ",
    "run.output_dir=out": "use run.directory=out; ",
    "run.max_steps=9": "use run.steps=9; ",
    "run.batch_size=9": "use run.tokens_per_step (sequences x data.sequence_length); ",
    "run.micro_batch_size=9": "use run.micro_batch=9; ",
    "run.gradient_accumulation_steps=4": "remove it: accumulation follows from run.tokens_per_step and run.micro_batch; ",
    "run.num_epochs=2": "use run.epochs=2; ",
    "run.resume=true": "remove it: the same command resumes; or use run.start_from for another run's weights; ",
    "run.lr=1e-4": "use optim.learning_rate=0.0001; ",
    "run.sequence_length=64": "did you mean `data.sequence_length`? ",
    "run.precision_policy=bf16": "",
    "run.policy=bf16": "did you mean `precision.policy`? ",
    "checkpoint.save_steps=5": "use checkpoint.every_steps=5; ",
    "checkpoint.save_total_limit=5": "use checkpoint.keep_last=5; ",
    "checkpoint.directory=x": "did you mean `run.directory` or `data.directory`? ",
    "evaluate.eval_steps=5": "use evaluate.every_steps=5; ",
    "report.logging_steps=5": "use report.every_steps=5; ",
    "training={steps: 5}": "use the section run: for steps use run.steps=5; keys of the recipe: ",
    "trainer={}": "use the section run; ",
    "optimizer={lr: 5, fun: 1}": "for lr use optim.learning_rate=5; no key is known for fun; keys of the recipe: ",
    "parallelism={tensor_parallel_degree: 2, data_parallel_shard_degree: -1}": (
        "use the section parallel: for tensor_parallel_degree use parallel.tp=2; "
        "for data_parallel_shard_degree use parallel.shard=-1; "
    ),
    "dataset={seq_len: 64, optimizer: adam}": "use the section data: for seq_len use data.sequence_length=64; for ",
    "lora={r: 8, alpha: 16}": "for r use adapter.kind=lora adapter.rank=8; for alpha use adapter.kind=lora adapter.alpha=16; ",
    "training_args={steps: 5}": "",
    "train={learning_rate: 1e-4, compile: true, data: {path: x}, fsdp: false}": (
        "for learning_rate use optim.learning_rate=0.0001; for compile use parallel.compile=true; for data use the section "
        "data; for fsdp use parallel.zero=0; "
    ),
    "peft={rank: 8}": "use the section adapter: for rank use adapter.kind=lora adapter.rank=8; ",
    "lr=1e-4": "use optim.learning_rate=0.0001; ",
    "max_steps=5": "use run.steps=5; ",
    "model.n_layers=4": "use model.num_hidden_layers=4; ",
    "model.dim=4": "use model.hidden_size=4; ",
    "model.flavor=8B": "use preset, from or family of model; ",
    "model.path=org/some": "use model.from=org/some; ",
    "model.expansion_ratio=4": "use intermediate_size of model, hidden_size times that; ",
}


def answers_to(overrides, tree=TREE):
    """The key of each refused override -> its message."""
    tree = copy.deepcopy(tree)
    for override in overrides:
        apply_override(tree, override)
    with pytest.raises(UserError) as caught:
        check_recipe(tree)
    return {error.given: error for error in getattr(caught.value, "errors", [caught.value])}


def test_a_wrong_key_in_nearly_the_right_place_is_answered_with_ours():
    family = {**TREE, "model": {"family": "qwen3", "hidden_size": 8}}
    said = answers_to(WRONG_KEYS, family)
    for override, answer in WRONG_KEYS.items():
        key = override.partition("=")[0]
        errors = [error for given, error in said.items() if given == key or given.startswith(f"model: {key[6:]}: ")]
        assert errors and answer in errors[0].change, (override, [error.change[:80] for error in errors])
        assert answer or not errors[0].change.startswith(("use", "did")), override


def test_a_model_by_another_word_for_its_name():
    (said,) = answers_to(["model={name: org/some}"]).values()
    assert said.change.startswith("use model.from=org/some; ")
    source = answers_to(["data.sources=[{dataset: org/some, column: body}]"])
    assert {given: error.change.partition(";")[0] for given, error in source.items()} == {
        "data.sources[0].dataset": "use hub: org/some",
        "data.sources[0].column": "use text: body",
    }


def test_what_is_answered_to_a_wrong_key_is_a_key_and_no_word_is_one():
    def keys(*sections):
        return mistakes._keys_at(RunConfig, sections)

    for section, rows in NEARLY.items():
        own = [*keys(*section.split(".")), *(tiny.QWEN3_KEYS if section == "model" else [])]
        for ours, words in rows.items():
            for place, key in re.findall(r"\b([a-z]+)\.([a-z_0-9]+)", ours):
                assert key in [*keys(place), *(tiny.QWEN3_KEYS + ["vocab_size"] if place == "model" else [])], ours
            assert not set(words.split()) & set(own), (section, ours)
        listed = [word for words in rows.values() for word in words.split()]
        assert len(listed) == len(set(listed)), section


UNDER_MODEL = {  # torchtune has the first there; all were answered with `remove`, and two with a field that is none of theirs
    "lora_rank=8": "use adapter.kind=lora adapter.rank=8; or remove `lora_rank`",
    "lora_rank=few": "use adapter.kind=lora adapter.rank (it must be a whole number); or remove `lora_rank`",
    "lora_attn_modules=[q_proj]": "use adapter.targets=[q_proj]; or remove `lora_attn_modules`",
    "lora_target=all": "use adapter.targets=all-linear; or remove `lora_target`",
    "gradient_checkpointing=true": "use parallel.recompute=full; or remove `gradient_checkpointing`",
    "n_layer=12": "use model.num_hidden_layers=12; or remove `n_layer`",
    "block_size=1024": "use data.sequence_length=1024; or remove `block_size`",
    "load_in_8bit=true": "use adapter.base=nf4 (four bits; eight are not in this version); or remove `load_in_8bit`",
    "use_flash_attention_2=true": "remove it: torch chooses the kernel of attention; the first lines of a run name it",
    "tie_weights=true": "use model.tie_word_embeddings=true; or remove `tie_weights`",
    "hiden_size=8": "did you mean `hidden_size`? write that, or remove `hiden_size`",
    "book_size=8": "remove `book_size`",
}


@pytest.mark.parametrize("override", UNDER_MODEL)
def test_another_tools_key_under_model_is_answered_as_anywhere(override):
    tree = {**TREE, "model": {"family": "qwen3", "hidden_size": 8}}
    said = {given: error.change for given, error in answers_to([f"model.{override}"], tree).items()}
    key = override.partition("=")[0]
    assert [change for given, change in said.items() if given.startswith(f"model: {key}: ")] == [UNDER_MODEL[override]]


def test_a_count_that_is_no_field_is_shown_as_it_was_given():
    """8B was shown as 8000000000."""
    (given,) = answers_to(["model.flavor=8B"])
    assert given == 'model: flavor: "8B"'
