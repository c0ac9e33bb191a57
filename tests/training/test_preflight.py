"""What is refused before something lasting happens: nothing is prepared, replaced or made."""

import json
import re
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import load_file

from tests import tiny
from tests.commands.test_data_lint import ERRORS, WARNING
from tests.commands.test_data_lint import base as base  # a fixture
from windlass.commands.models.export import export
from windlass.config import load_recipe
from windlass.data.lint.lint import LintResult
from windlass.data.prepare.prepare import open_prepared
from windlass.data.tokenize.tokenizer import open_tokenizer, save_trained, train_tokenizer, vocab_size_of
from windlass.errors import SeveralErrors, UserError
from windlass.parallel.rules import pipeline
from windlass.runtime import start_runtime
from windlass.training import preflight
from windlass.training.loop import train
from windlass.training.preflight import check_before_training, check_run, make_ready, prepare_only
from windlass.training.start.model_plan import plan_of
from windlass.training.start.parameter_rules import rules_of


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"run": {"micro_batch": 3}}, "sequences per step must be a multiple"),
        ({"run": {"start_from": "nowhere"}}, "nowhere does not exist"),
        ({"run": {"directory": __file__}}, "is a file"),
        ({"run": {"directory": __file__ + "/run"}}, "is a file"),
    ],
)
def test_a_refused_recipe_leaves_no_trace(tmp_path, sections, said):
    config = tiny.recipe(tmp_path, **sections)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError) as refused:
        make_ready(config, 1, "cpu")
    assert said in str(refused.value)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("sections", "given"),
    [
        ({"precision": {"policy": "bf16", "gradients": "bf16"}}, "precision.gradients=bf16 on 2 ranks"),
        ({"parallel": {"shard": 3}}, "parallel"),
    ],
)
def test_rules_of_the_number_of_ranks_are_judged_before_anything_is_written(tmp_path, sections, given):
    config = tiny.recipe(tmp_path, **sections)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=given) as refused:
        preflight.check_run(config, 2, "cpu")
    assert "2 ranks" in str(refused.value) and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("begin", [prepare_only, lambda config: make_ready(config, 1, "cpu")])
def test_a_tokenizer_with_more_entries_than_the_model_has_rows_is_refused_before_the_corpus_is_tokenised(
    tmp_path, begin
):
    save_trained(train_tokenizer(["the same few words"], 300), tmp_path / "tokenizer")
    found = {"train": None, "from": str(tmp_path / "tokenizer")}
    config = tiny.recipe(tmp_path, model={"vocab_size": 100}, data={"tokenizer": found})
    with pytest.raises(UserError) as refused:
        begin(config)
    entries = vocab_size_of(open_tokenizer(tmp_path / "tokenizer")[0])
    assert refused.value.given == f"model: vocab_size 100, and a tokenizer with {entries} entries"
    assert not (tmp_path / "data").exists() and not config.run.directory.exists()


@pytest.mark.parametrize(
    "begin",
    [prepare_only, partial(prepare_only, with_weights=False), lambda config: make_ready(config, 1, "cpu")],
    ids=["prepare", "prepare --data-only", "train"],
)
def test_a_tokenizer_too_large_for_the_model_that_a_run_begins_from_is_refused_as_early(tmp_path, exported, begin):
    shape = json.loads((exported.directory / "config.json").read_text())
    save_trained(train_tokenizer([Path(__file__).read_text()], 2 * shape["vocab_size"]), tmp_path / "tokenizer")
    found = {"train": None, "from": str(tmp_path / "tokenizer")}
    model = {**dict.fromkeys(tiny.MODEL), "from": str(exported.directory)}
    config = tiny.recipe(tmp_path, model=model, data={"tokenizer": found})
    with pytest.raises(UserError) as refused:
        begin(config)
    entries = vocab_size_of(open_tokenizer(tmp_path / "tokenizer")[0])
    assert entries > shape["vocab_size"]
    assert f"vocab_size {shape['vocab_size']}, and a tokenizer with {entries} entries" in refused.value.given
    assert not (tmp_path / "data").exists() and not config.run.directory.exists()


def before_training(base, name):
    config, runtime = load_recipe(base / name), start_runtime()
    try:
        return check_before_training(open_prepared(config.data, config.evaluate.sets), config, runtime)
    finally:
        runtime.close()


def test_before_step_0_warnings_are_a_line_each(base):
    assert before_training(base, "tiny.yaml") == []
    (line,) = before_training(base, "overlap.yaml")
    assert line.startswith("warning validation-in-train: 60 of 60 documents are training documents")


def test_before_step_0_errors_are_refused_with_the_command_that_reports_all(base, monkeypatch):
    monkeypatch.setattr(preflight, "lint", lambda *a, **k: LintResult([*ERRORS, WARNING], []))
    with pytest.raises(UserError) as caught:
        before_training(base, "tiny.yaml")
    given, rule, change = caught.value.given, caught.value.rule, caught.value.change
    assert given.startswith(
        f"the data in {base / 'data'} is wrong: error mask-empty: much (train: sample 0); error eos"
    )
    assert given.endswith("(train: sample 2); and 1 more errors") and "duplicate" not in given
    assert rule == "training begins on data without errors of `windlass data lint`"
    assert change.startswith("nothing of it would be learned") and change.endswith("windlass data lint RECIPE")


def test_a_run_reports_warnings_before_its_first_step(base, capfd):
    train(load_recipe(base / "overlap.yaml", "run.steps=2", "optim.warmup_steps=0", f"run.directory={base / 'run'}"))
    out = capfd.readouterr().out
    assert 0 <= out.index("warning validation-in-train") < out.index("step 1/2")


def test_a_run_refuses_to_begin_on_wrong_data_and_makes_no_directory(base, monkeypatch):
    monkeypatch.setattr(preflight, "lint", lambda *a, **k: LintResult([*ERRORS], []))
    with pytest.raises(UserError, match="is wrong: error mask-empty"):
        train(load_recipe(base / "tiny.yaml", f"run.directory={base / 'refused'}"))
    assert not Path(base / "refused").exists()


@pytest.mark.parametrize(
    ("given", "said", "remedy"),
    [
        (
            {"context": 3, "context_kind": "ulysses"},
            "data.sequence_length=16 with parallel.context=3",
            {"context": 3, "context_kind": "ulysses", "length": 18},
        ),
        (
            {"context": 2, "context_kind": "ulysses"},
            "parallel.context=2 with parallel.context_kind=ulysses for a model of 3 query heads",
            {"context": 2},
        ),
    ],
)
def test_rows_that_context_ranks_cannot_share_are_refused_before_data_is_prepared(tmp_path, given, said, remedy):
    def ready(context, length=16, **parallel):
        sizes = {"data": {"sequence_length": length}, "run": {"tokens_per_step": 8 * length}}
        config = tiny.recipe(tmp_path, parallel={"context": context, **parallel}, **sizes)
        make_ready(config, context, "cpu")

    with pytest.raises(UserError) as caught:
        ready(**given)
    assert said in caught.value.given and not (tmp_path / "data").exists()
    ready(**remedy)


@pytest.mark.parametrize(
    ("given", "said", "remedy"),
    [
        (
            {"parallel": {"pp": 4, "schedule": "gpipe"}},
            "a model of 2 blocks",
            {"parallel": {"pp": 2, "schedule": "gpipe"}},
        ),
        (
            {"parallel": {"pp": 2, "shard": 1}, "run": {"tokens_per_step": 32}},
            "1 micro-batch per step with parallel.pp=2 and parallel.schedule=1f1b",
            {"parallel": {"pp": 2, "shard": 1}, "run": {"tokens_per_step": 64}},
        ),
    ],
)
def test_a_pipeline_that_cannot_run_is_refused_before_data_is_prepared(tmp_path, given, said, remedy):
    with pytest.raises(UserError) as caught:
        make_ready(tiny.recipe(tmp_path, **given), given["parallel"]["pp"], "cpu")
    assert said in caught.value.given and not (tmp_path / "data").exists()
    named = [f"{section}.{key}={value}" for section, keys in remedy.items() for key, value in keys.items()]
    assert any(setting in caught.value.change for setting in named)
    make_ready(tiny.recipe(tmp_path, **remedy), 2, "cpu")


def test_a_schedule_that_this_torch_cannot_run_is_refused_before_data_is_prepared(tmp_path):
    config = tiny.recipe(tmp_path, model={"num_hidden_layers": 4}, parallel={"pp": 2, "schedule": "zbv"})
    old = mock.patch.object(pipeline.importlib.metadata, "version", lambda _: "2.11.0")
    with old, pytest.raises(UserError, match=r"torch 2\.11\.0"):
        make_ready(config, 2, "cpu")
    assert not (tmp_path / "data").exists()


def test_what_this_torch_cannot_run_is_listed_with_what_the_model_cannot_have(tmp_path):
    base = dict.fromkeys(tiny.MODEL) | {"from": str(tiny.write_base(tmp_path / "base"))}
    parallel = {"tp": 3, "context": 2, "context_kind": "ulysses", "compile": True}
    config = tiny.recipe(
        tmp_path, model=base, parallel=parallel, data={"sequence_length": 48}, run={"tokens_per_step": 192}
    )
    old = mock.patch.object(pipeline.importlib.metadata, "version", lambda _: "2.11.0")
    with old, pytest.raises(SeveralErrors) as caught:
        check_run(config, 6, "cpu")
    given = [error.given for error in caught.value.errors]
    assert any(one.startswith("parallel.tp=3 for a model of 4 query heads") for one in given), given
    assert "parallel.context_kind=ulysses with parallel.compile=true and torch 2.11.0" in given


# ---- a budget of activations


def recipe(base, name, **parallel):
    return tiny.recipe(base, name, parallel=parallel, run={"steps": 2, "micro_batch": 2}, evaluate={"every_steps": 2})


def test_a_base_gets_new_rows_which_train_and_are_exported_but_not_beside_an_adapter(tmp_path, capsys):
    rows = dict.fromkeys(tiny.MODEL) | {"from": str(tiny.write_base(tmp_path / "base")), "vocab_size": 303}
    config = tiny.recipe(tmp_path, model=rows, parallel={}, optim={"weight_decay": 0.1})
    train(config)
    assert "padded to 384; 3 rows are new, the mean of the others" in capsys.readouterr().out
    export(config.run.directory)  # transformers loads it, and both models agree
    base, ours = (
        load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        for folder in (tmp_path / "base", config.run.directory / "export")
    )
    assert (len(base), len(ours)) == (300, 303) and 0 < (ours[300] - base.mean(0)).abs().max() < 0.1, "trained since"
    adapted = tiny.recipe(tmp_path, "adapted", model=rows, adapter={"kind": "lora", "rank": 2})
    with pytest.raises(UserError) as caught:
        train(adapted)
    assert caught.value.given == "model.vocab_size=303 with a base of 300 rows, and an adapter"
    assert "model.resize_token_embeddings(303)" in caught.value.change and not adapted.run.directory.exists()


def test_a_budget_that_cannot_be_met_is_refused_before_anything_is_made(tmp_path):
    config = recipe(tmp_path, "run", recompute="selective", activation_gib=1e-6)
    with pytest.raises(UserError, match=r"micro-batches of 2 x 16 tokens") as caught:
        train(config)
    assert not config.run.directory.exists() and not (tmp_path / "data").exists()
    gib = re.search(r"parallel.activation_gib=([\d.e-]+)", caught.value.change)[1]
    config = recipe(tmp_path, "run", recompute="selective", activation_gib=gib)
    architecture = config.model.architecture(300)
    with start_runtime() as runtime:
        assert plan_of(config, architecture, rules_of(config, architecture), runtime)


def test_a_budget_is_reported_and_changes_no_loss(tmp_path, capsys):
    plain = recipe(tmp_path, "plain")
    train(plain)
    assert "  activations  " not in capsys.readouterr().out
    budget = recipe(tmp_path, "budget", recompute="selective", activation_gib=90_000 / (1 << 30))
    train(budget)
    line = "recompute in 2 blocks: 1 none, 1 selective; they keep 82.5 KiB per micro-batch"
    assert f"activations    {line}" in capsys.readouterr().out
    assert f"# activations: {line}" in (budget.run.directory / "resolved.yaml").read_text()
    assert tiny.losses(budget.run.directory) == tiny.losses(plain.run.directory)


def test_without_a_budget_the_line_repeats_the_recipe(tmp_path, capsys):
    train(recipe(tmp_path, "run", recompute="full"))
    assert "activations    recompute full" in capsys.readouterr().out
