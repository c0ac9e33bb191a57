"""What is answered to another tool's name is taken by a recipe, or is words alone: no answer is refused at the next start."""

import copy

import pytest
import yaml
from pydantic import ValidationError

from tests.other_names.test_renamed_keys import TREE, answers_to
from windlass.config import RunConfig, check_recipe
from windlass.errors import UserError
from windlass.mistakes import SETTING, _end_of_value, accepted
from windlass.other_names.renamed_keys import NEARLY
from windlass.other_names.table import TABLE
from windlass.recipe import apply_override, parse_yaml

VALUES = (
    "true", "false", "null", "-1", "1", "8", "0.0", "0.1", "1k", "none", "auto", "full",
    "cosine", "cosine_with_restarts", "polynomial", "warmup_stable_decay",
    "AdamW", "adamw_torch_fused", "adafactor", "muon", "1000ba", "1ep", "1B", "float16",
    "amp_bf16", "16", "mixed", "reduce-overhead", "jsonl", "a/b", "my out",
    "wandb", "[wandb, tensorboard]", "[q_proj]", "qlora", "dpo", "kto", "sigmoid", "full_shard",
    "{mode: full}", "{warmup_steps: 200, decay_ratio: 0.8}", "{name: cosine_with_warmup, t_warmup: 100ba}",
    "{dataset: {streaming: true}}", "{r: 8, alpha: 16}", "{enabled: true}", "a: [", "x; y", "1,000,000", "it's", "''", "[]", "{}",
)  # fmt: skip
"""As other tools' files have them, whatever their key is."""


def as_given(value):
    try:
        return parse_yaml(value, "")
    except UserError:
        return value


def settings_in(answer):
    """The `section.key=value` of an answer."""
    for found in SETTING.finditer(answer):
        yield f"{found[1]}.{found[2]}", answer[found.end() : _end_of_value(answer, found.end())]


def refusal(key, value):
    """Why the key alone does not take the value; None where it does."""
    tree = {}
    apply_override(tree, f"{key}={value}")
    ((section, given),) = tree.items()
    try:
        RunConfig.model_fields[section].annotation.model_validate(given)
    except UserError:  # a rule beside other keys
        return None
    except ValidationError as error:
        return [item for item in error.errors() if item["loc"][:1] == tuple(given)] or None
    return None


def words():
    """(section, key) of every row."""
    for row in TABLE:
        yield from ((where, word) for word in row.words.split() for where in ("", row.section))
    for section, rows in NEARLY.items():
        yield from ((section, word) for listed in rows.values() for word in listed.split() if "." not in section)


@pytest.mark.parametrize("value", VALUES)
def test_what_is_answered_to_any_word_with_any_value_is_taken(value):
    """All words of all rows in one recipe: some 400 mistakes."""
    tree, given = copy.deepcopy(TREE), as_given(value)
    for section, word in dict.fromkeys(words()):
        if section != "model":
            held = tree.setdefault(section, {}) if section else tree
            held.setdefault(word, given)
    with pytest.raises(UserError) as caught:
        check_recipe(tree)
    said = [error.change.partition("; keys of ")[0] for error in caught.value.errors]
    found = [(key, proposed, one) for one in said for key, proposed in settings_in(one)]
    assert len(said) > 200 and len(found) > 20
    assert [one for one in found if refusal(*one[:2]) is not None] == []


@pytest.mark.parametrize("value", VALUES)
def test_what_is_answered_to_a_word_for_a_size_of_the_model_is_a_whole_number(value):
    for word in ("n_layer", "n_head", "n_embd"):
        tree = copy.deepcopy(TREE) | {word: as_given(value)}
        with pytest.raises(UserError) as caught:
            check_recipe(tree)
        said = caught.value.change.partition("; keys of ")[0]
        assert all(type(yaml.safe_load(proposed)) is int for _, proposed in settings_in(said)), said


ANSWERS = {  # answers that were refused at the next start, or wrong
    "lr_scheduler_type=cosine_with_restarts": (
        "use optim.schedule (cosine_with_restarts is not in this version; it must be 'cosine', 'wsd', 'linear' or 'constant'); "
    ),
    "lr_scheduler_type=constant_with_warmup": "use optim.schedule=constant; ",
    "activation_checkpoint={mode: full}": "use parallel.recompute=full; ",
    "lr_scheduler={warmup_steps: 200}": "use the section optim: for warmup_steps use optim.warmup_steps=200; ",
    "scheduler={name: cosine_with_warmup, t_warmup: 10}": (
        "use the section optim: for name use optim.schedule=cosine; for t_warmup use optim.warmup_steps; "
    ),
    "lr_scheduler={warmup_steps: 2, decay_ratio: 0.8, decay_type: linear, min_lr_factor: 0.1}": (
        "use the section optim: for warmup_steps use optim.warmup_steps=2; for decay_ratio use optim.schedule=wsd "
        "optim.decay_fraction=0.8; for decay_type use optim.schedule=linear (wsd beside a decay_ratio); for min_lr_factor use "
        "optim.floor=0.1; "
    ),
    "optim.scheduler={num_cycles: 2, fun: 1}": (
        "use the section optim: for num_cycles use optim.schedule, which has no restarts; no key is known for fun; "
    ),
    "lr_scheduler_kwargs={min_lr_rate: 0.1}": "use the section optim: for min_lr_rate use optim.floor=0.1; ",
    "training={mixed_precision_param: bfloat16}": "for mixed_precision_param use precision.parameters=bf16; keys of",
    "training={dataloader_num_workers: 4}": "remove dataloader_num_workers: batches are read ahead by a thread of",
    "train_loader={dataset: {a: 1}}": "use data.sources, whose keys are others (windlass keys data.sources); ",
    "save_interval=1000ba": "use checkpoint.every_steps=1000; ",
    "eval_interval=500ba": "use evaluate.every_steps=500; ",
    "max_steps=-1": "use run.steps (it must be at least 1); ",
    "optim.name=adafactor": "use optim.kind (adafactor is not in this version; it must be 'adamw' or 'muon'); ",
    "optim.type=AdamW": "use optim.kind=adamw; ",
    "parallel.sequence_parallel=true": "parallelism along; parallel.context (its values: windlass keys parallel.context) cuts",
    "dtype=float16": "use precision.policy=fp16; ",
    "dropout=0.0": "use attn_pdrop, embd_pdrop and resid_pdrop of model.family=gpt2, attention_dropout of others, or ada",
    "bias=false": "remove it: model.family=gpt2 has biases; or use attention_bias and mlp_bias of a model.family that has",
    "evaluate.batch_size=8": "use run.micro_batch (validation has the same); ",
    "data_seed=42": "remove it: run.seed is of the data's order too; ",
    "checkpointer={checkpoint_dir: x}": "use model.from for its checkpoint_dir, run.directory for its output_dir; ",
    "metric_logger.log_dir=x": "use report.sinks, beside the lines and the page in run.directory; ",
    "report.to=wandb": "use report.sinks=[wandb]; ",
    "report.wandb=true": "use report.sinks=[wandb]; ",
    "report_to=[wandb, tensorboard]": "use report.sinks=[wandb, tensorboard]; ",
    "report_to=none": "use report.sinks=[]; ",
    "data.streaming=true": "remove it: shards are read as they are needed; or use data.order.first_epoch=written to train",
}


@pytest.mark.parametrize("override", ANSWERS)
def test_answers_by_their_value(override):
    (error,) = answers_to([override]).values()
    assert ANSWERS[override] in error.change


def test_a_section_of_ours_is_named_where_a_key_goes_there():
    (error,) = answers_to(["training={mixed_precision_param: bfloat16}"]).values()
    assert error.change.startswith("for mixed_precision_param use precision.parameters=bf16; ")
    (error,) = answers_to(["training={mixed_precision_param: bfloat16, steps: 5}"]).values()
    assert error.change.startswith("use the section run: for mixed_precision_param use ")


@pytest.mark.parametrize(
    ("word", "change"),
    [("adafactor", "use optim.kind=adamw, or muon"), ("lion_32bit", "use optim.kind=adamw, or muon")],
)
def test_an_optimizer_that_is_not_here_is_named_as_such(word, change):
    (error,) = answers_to([f"optim={word}"]).values()
    assert error.change == change and error.rule.endswith(f"{word} is not in this version")


def test_a_format_of_a_file_in_a_source_is_its_file_format():
    (error,) = answers_to(["data.sources=[{path: texts, type: jsonl}]"]).values()
    assert error.change.startswith("use file_format: jsonl; ")
    (error,) = answers_to(["data.sources=[{path: texts, type: chat}]"]).values()
    assert error.change.startswith("use format: chat; ")


def test_only_what_is_refused_is_left_out_of_an_answer():
    answer = "use optim.learning_rate=x optim.beta1=0.9; run.steps=5, or data.sources=[{path: 3}] (of a list)"
    assert accepted(RunConfig, answer) == (
        "use optim.learning_rate (it must be a number) optim.beta1=0.9; run.steps=5, "
        "or data.sources (its values: windlass keys data.sources) (of a list)"
    )
    assert accepted(RunConfig, "use nothing=3 or model.dim=x") == "use nothing=3 or model.dim=x"
