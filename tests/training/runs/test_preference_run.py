"""Whole runs on pairs: what they learn, print, keep and refuse; the reference is the model that the run began with."""

import json
import shutil

import pytest

from tests import tiny
from windlass.checkpoint.keep import diff
from windlass.commands.models.evaluate import evaluate
from windlass.commands.models.export import export
from windlass.config import to_yaml
from windlass.data.prepare.prepare import prepare
from windlass.errors import UserError
from windlass.objectives.kept_scores import SCORES, ReferenceScores
from windlass.training.announce import describe_objective
from windlass.training.loop import train

DPO = {"kind": "dpo", "beta": 0.5}
LORA = {"kind": "lora", "rank": 4, "alpha": 8}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base, and pairs."""
    directory = tmp_path_factory.mktemp("pairs")
    tiny.write_pairs(directory / "pairs.jsonl")
    tiny.write_base(directory / "base")
    return directory


def recipe(place, name="run", adapter=None, **sections):
    given = {
        "model": dict.fromkeys(tiny.MODEL) | {"from": str(place / "base")},
        "run": {"tokens_per_step": 24 * 8, "micro_batch": 4},
        "data": {"sources": [{"path": str(place / "pairs.jsonl"), "format": "preference"}], "sequence_length": 24},
        "objective": DPO,
        **({"adapter": adapter} if adapter else {}),
    }
    for section, keys in sections.items():
        given[section] = {**given.get(section, {}), **keys}
    return tiny.recipe(place, name, **given)


@pytest.fixture(scope="module")
def full(place):
    """A finished run that trains all parameters."""
    train(recipe(place, "full"))
    return place / "full"


def steps_of(run, kind="step"):
    return [line for line in tiny.lines(run) if line["kind"] == kind]


def test_the_chosen_answer_becomes_more_likely_than_the_rejected(full):
    first, *_, last = steps_of(full)
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5), "log 2: as yet the model is its own reference"
    assert first["reward_chosen"] == first["reward_rejected"] == first["margin"] == pytest.approx(0, abs=1e-5)
    assert last["loss"] < 0.5 and last["accuracy"] == 1.0 and last["margin"] > 0.5
    assert last["margin"] == pytest.approx(last["reward_chosen"] - last["reward_rejected"], abs=1e-5)
    assert {line["pairs"] for line in steps_of(full)} == {4}


def test_the_announcement_names_loss_and_reference(place, full):
    derived = tiny.lines(full)[0]["derived"]
    assert derived["objective"] == "dpo, sigmoid, beta 0.5; reference: scores of the model that the run began with"
    assert derived["packing"].startswith("a pair is two sequences, ") and "epochs" in derived["length"]
    simpo = recipe(place, objective={"loss": "simpo", "beta": 2.0})
    assert describe_objective(simpo, False) == {"objective": "dpo, simpo, beta 2, without a reference"}
    found = describe_objective(recipe(place, adapter=LORA), False)
    assert found["objective"].endswith("; reference: the base, without the factors")


def test_the_closing_table_is_of_losses_per_pair(place, capsys):
    train(recipe(place, "table", LORA, run={"steps": 2}))
    assert "loss per pair" in (said := capsys.readouterr().out) and "loss (nats)" not in said


def test_validation_is_of_pairs_too(full):
    first, *_, last = steps_of(full, "validation")
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5) and last["loss"] < first["loss"]
    assert last["accuracy"] > 0.5 and last["pairs"] == 3, "six sequences are three pairs"
    assert (
        last["perplexity"] is None and last["bits_per_byte"] is None and steps_of(full, "start")[0]["baselines"] == {}
    )


@pytest.mark.parametrize("adapter", [None, LORA, {**LORA, "base": "nf4"}], ids=["full", "lora", "nf4"])
def test_a_killed_run_ends_bit_for_bit_where_the_whole_one_does(place, full, adapter):
    name = "full" if adapter is None else f"adapter {adapter.get('base')}"
    if adapter is not None:
        train(recipe(place, name, adapter))
    whole, resumed = place / name, place / f"{name} resumed"
    shutil.copytree(whole, resumed)
    for step in (6, 9, 10):
        shutil.rmtree(resumed / "checkpoints" / f"step-{step:08d}")
    train(recipe(place, resumed.name, adapter))
    assert [line["loss"] for line in steps_of(resumed)][-7:] == [line["loss"] for line in steps_of(whole)][-7:]
    assert not diff(*(run / "checkpoints/step-00000010" for run in (whole, resumed))).bytes


def test_a_checkpoint_keeps_the_scores_of_the_model_that_the_run_began_with(full, place):
    kept = [ReferenceScores.parse((full / f"checkpoints/step-{step:08d}" / SCORES).read_bytes()) for step in (3, 10)]
    beside = list((place / "data").glob("reference-*.safetensors"))
    assert len(beside) == 1
    scores = ReferenceScores.parse(beside[0].read_bytes())
    for one in kept:
        assert one.began_with == scores.began_with
        assert {name: found.tolist() for name, found in one.sets.items()} == {
            name: found.tolist() for name, found in scores.sets.items()
        }
    assert set(scores.sets) == {"train", "validation"} and (scores.sets["train"] < 0).all()
    assert len(scores.sets["train"]) + len(scores.sets["validation"]) == 80


def test_a_run_that_goes_on_never_scores_with_what_it_has_trained(place, full):
    """The reference would be the model after step 3. The file beside the data, which would hide it, is gone."""
    resumed, away = place / "scores gone", place / "away"
    shutil.copytree(full, resumed)
    for step in (6, 9, 10):
        shutil.rmtree(resumed / "checkpoints" / f"step-{step:08d}")
    away.mkdir()
    kept = [file.rename(away / file.name) for file in (place / "data").glob("reference-*")]
    try:
        train(recipe(place, resumed.name))
        assert kept and not list((place / "data").glob("reference-*"))
    finally:
        for file in kept:
            file.rename(place / "data" / file.name)
    assert [line["loss"] for line in steps_of(resumed)][-7:] == [line["loss"] for line in steps_of(full)][-7:]
    assert not diff(*(run / "checkpoints/step-00000010" for run in (full, resumed))).bytes


def test_a_second_run_reads_them_and_other_weights_have_their_own(place, full, capsys):
    train(recipe(place, "other beta", objective={"beta": 0.1}))
    assert "reference scores of train" not in capsys.readouterr().out
    files = set((place / "data").glob("reference-*"))
    tiny.write_base(place / "other base", seed=6)
    train(recipe(place, "other", model={"from": str(place / "other base")}, run={"steps": 2}))
    assert "reference scores of train: 0 of 68 pairs" in capsys.readouterr().out
    assert len(set((place / "data").glob("reference-*")) - files) == 1


@pytest.mark.parametrize("what", ["factors", "checkpoint"])
def test_scores_are_of_the_factors_and_of_the_checkpoint_that_a_run_began_from(place, what, capsys):
    """Two runs alike but for the file that one begins from."""
    for steps in (2, 3):
        train(recipe(place, f"{what} {steps}", LORA if what == "factors" else None, run={"steps": steps}))
        if what == "factors":
            export(place / f"factors {steps}", place / f"files {steps}")
    capsys.readouterr()
    found = []
    for number, steps in enumerate((2, 3, 2)):
        if what == "factors":  # one directory: only what is in it differs
            shutil.copytree(place / f"files {steps}", place / "files", dirs_exist_ok=True)
            adapter = {**LORA, "from": str(place / "files")}
            other = recipe(place, f"from factors {number}", adapter, run={"steps": 2})
        else:
            start = {"steps": 2, "start_from": str(place / f"checkpoint {steps}")}
            other = recipe(place, f"from checkpoint {number}", run=start)
        train(other)
        found.append("reference scores of train: 0 of" in capsys.readouterr().out)
        assert steps_of(place / f"from {what} {number}")[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert found == [True, True, False], "the third begins where the first did, and reads its scores"


@pytest.mark.parametrize("where", ["recipe", "config.json"])
def test_scores_are_of_all_that_the_model_computes_with_its_weights(place, full, where, capsys):
    """The same weights under another rope are another reference."""
    base = shutil.copytree(place / "base", place / f"rope in {where}")
    train(recipe(place, f"before {where}", model={"from": str(base)}, run={"steps": 2}))
    assert "reference scores of train: 0 of" not in capsys.readouterr().out, "another directory of the same files"
    changed = {"rope_theta": 3.0} if where == "recipe" else {}
    if not changed:
        fields = json.loads((base / "config.json").read_text())
        fields["rope_parameters"]["rope_theta"] = 5.0
        (base / "config.json").write_text(json.dumps(fields))
    train(recipe(place, f"after {where}", model={"from": str(base), **changed}, run={"steps": 2}))
    assert "reference scores of train: 0 of" in capsys.readouterr().out
    assert steps_of(place / f"after {where}")[0]["loss"] == pytest.approx(0.693147, abs=1e-5)


SPOILT = {
    "bit": lambda data: data[:-3] + bytes([data[-3] ^ 4]) + data[-2:],
    "half": lambda data: data[:90],
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("how", SPOILT)
def test_scores_that_were_damaged_are_made_again(place, full, how, capsys):
    kept = ReferenceScores.parse((full / "checkpoints/step-00000010" / SCORES).read_bytes())
    file = place / f"data/reference-{kept.began_with}.safetensors"
    whole = file.read_bytes()
    file.write_bytes(SPOILT[how](whole))
    assert ReferenceScores.parse(file.read_bytes()) is None
    train(recipe(place, f"again {how}", run={"steps": 2}))
    assert file.read_bytes() == whole and "reference scores of train" in capsys.readouterr().out


def test_an_adapter_that_begins_at_its_base_keeps_no_scores(place):
    train(recipe(place, "bare", LORA, run={"steps": 2}))
    assert not (place / "bare/checkpoints/step-00000002" / SCORES).exists()
    assert steps_of(place / "bare")[0]["loss"] == pytest.approx(0.693147, abs=1e-5)


def test_weights_and_offsets_of_rows_are_not_rounded_to_bf16(place):
    """As FSDP2 rounds whatever a model is called with: the first loss was 0.6923."""
    train(recipe(place, "bf16", LORA, precision={"policy": "bf16"}, run={"steps": 2}))
    assert steps_of(place / "bf16")[0]["loss"] == pytest.approx(0.693147, abs=2e-6)


def test_an_adapter_that_was_trained_before_is_compared_with_itself_not_with_its_base(place):
    """The usual case: supervised finetuning with an adapter, then preferences on it."""
    train(recipe(place, "first", LORA, run={"steps": 4}))
    train(recipe(place, "second", LORA, run={"steps": 4, "start_from": str(place / "first")}))
    second = steps_of(place / "second")
    assert second[0]["loss"] == pytest.approx(0.693147, abs=1e-5), "its reference is where it began"
    assert (place / "second/checkpoints/step-00000004" / SCORES).exists()
    shutil.rmtree(place / "second/checkpoints/step-00000004")
    train(recipe(place, "second", LORA, run={"steps": 4}))  # without start_from: the checkpoint decides
    assert steps_of(place / "second")[-1]["loss"] == second[-1]["loss"]


@pytest.mark.parametrize("began", ["full", "lora", "lora of norms too", "lora from files"])
def test_a_run_without_a_reference_cannot_get_one_later(place, began):
    """With an adapter that does not begin at its base the reference would be the base with the norms that are trained since."""
    name, adapter = f"simpo {began}", None if began == "full" else LORA
    if began == "lora of norms too":
        adapter = {**LORA, "also_train": ["*norm*"]}
    if began == "lora from files":
        train(recipe(place, "for files", LORA, run={"steps": 2}))
        export(place / "for files", place / "factors")
        adapter = {**LORA, "from": str(place / "factors")}
    train(recipe(place, name, adapter, objective={"loss": "simpo", "beta": 2.0}, run={"steps": 3}))
    assert not (place / name / "checkpoints/step-00000003" / SCORES).exists()
    assert steps_of(place / name)[0]["reward_chosen"] < 0, "it needs no reference"
    more = {"steps": 6, "accept_drift": ["objective.loss"]}
    with pytest.raises(UserError, match=f"{name} holds no reference scores"):
        train(recipe(place, name, adapter, objective={"loss": "sigmoid", "beta": 2.0}, run=more))
    assert len(steps_of(place / name)) == 3


def test_pairs_of_other_data_than_it_began_with_are_refused(place, full):
    scores = ReferenceScores.parse((full / "checkpoints/step-00000010" / SCORES).read_bytes())
    own = scores.pairs["train"]
    assert scores.of("train", 68, own) is scores.sets["train"]
    for name, samples, pairs, held in (
        ("train", 73, own, "68"),
        ("train", 68, scores.pairs["validation"], "68 other pairs"),
        ("other", 5, own, "none"),
    ):
        words = f"the set {name} holds {samples} pairs, and the run has reference scores of {held}"
        with pytest.raises(UserError) as caught:
            scores.of(name, samples, pairs)
        assert caught.value.given == words


@pytest.mark.parametrize("what", ["train", "one of evaluate.sets", "evaluate --recipe"])
def test_as_many_other_pairs_are_refused_too(place, what):
    """Where the number alone was compared, a run trained against the scores of other pairs, and `evaluate` printed their loss."""
    base = place / what.replace(" ", "-")
    pairs = [tiny.write_pairs(base.with_suffix(f".{seed}.jsonl"), 20, seed) for seed in range(3)]
    first, second, third = ({"path": str(file), "format": "preference"} for file in pairs)

    def of(source, more, directory, **run):
        data = {"sources": [source], "validation": third, "directory": str(base.with_suffix(directory))}
        return recipe(place, base.name, run={"steps": 2, **run}, data=data, evaluate={"sets": {"more": more}})

    train(of(first, first, ".data"))
    events = (place / base.name / "events.jsonl").read_bytes()
    longer = {"steps": 4, "accept_drift": ["data", "data.sources", "data.directory"]}
    other = of(second, first, ".other", **longer) if what == "train" else of(first, second, ".other", steps=4)
    with pytest.raises(
        UserError, match=r"(train|more) holds 20 pairs, and the run has reference scores of 20 other pairs"
    ):
        if what == "evaluate --recipe":
            prepare(other.data, other.evaluate.sets)
            base.with_suffix(".yaml").write_text(to_yaml(other))
            evaluate(place / base.name, recipe=str(base.with_suffix(".yaml")))
        else:
            train(other)
    if what == "evaluate --recipe":
        assert (place / base.name / "events.jsonl").read_bytes() == events


@pytest.mark.parametrize("name", ["full", "norms too"])
def test_evaluate_refuses_pairs_where_nothing_is_known_of_the_reference(place, name):
    """A run on texts began with another model than its factors are beside now; none is silently taken instead."""
    adapter = None if name == "full" else {**LORA, "also_train": ["*norm*"]}
    simpo = {"loss": "simpo", "beta": 2.0}
    train(recipe(place, f"no reference {name}", adapter, objective=simpo, run={"steps": 2}))
    (place / "pairs.yaml").write_text(to_yaml(recipe(place, "pairs", adapter)))
    with pytest.raises(UserError, match=f"no reference {name}.*holds no reference scores"):
        evaluate(place / f"no reference {name}", recipe=str(place / "pairs.yaml"))


def test_data_with_scores_beside_it_is_prepared_again(place):
    """Of the reference scores, which belong to the data of before, nothing is left."""
    tiny.write_pairs(place / "again.jsonl")
    data = {"sources": [{"path": str(place / "again.jsonl"), "format": "preference"}], "directory": str(place / "anew")}
    train(recipe(place, "anew 1", data=data, run={"steps": 2}))
    assert len(list((place / "anew").glob("reference-*"))) == 1
    tiny.write_pairs(place / "again.jsonl", seed=3)
    prepare(recipe(place, "anew 2", data=data).data, {})
    assert not list((place / "anew").glob("reference-*"))
    train(recipe(place, "anew 2", data=data, run={"steps": 2}))
    assert steps_of(place / "anew 2")[0]["loss"] == pytest.approx(0.693147, abs=1e-5)


def test_scores_of_a_set_that_was_replaced_are_no_other_runs(place, capsys):
    """Data at a URL keep theirs in the run's directory, where they outlive the set that they are of; here put back by hand."""
    tiny.write_pairs(place / "set.jsonl", 20)
    data = {"directory": str(place / "sets-data")}
    sets = {"sets": {"more": {"path": str(place / "set.jsonl"), "format": "preference"}}}
    train(recipe(place, "set 1", data=data, evaluate=sets, run={"steps": 2}))
    (file,) = (place / "sets-data").glob("reference-*")
    scores = file.read_bytes()
    tiny.write_pairs(place / "set.jsonl", 20, seed=3)
    prepare(recipe(place, "set 2", data=data, evaluate=sets).data, recipe(place, evaluate=sets).evaluate.sets)
    file.write_bytes(scores)
    capsys.readouterr()
    train(recipe(place, "set 2", data=data, evaluate=sets, run={"steps": 2}))
    assert "reference scores of more: 0 of 20 pairs" in capsys.readouterr().out


def test_the_card_of_an_export_gives_the_loss_per_pair(place, full):
    loss = steps_of(full, "validation")[-1]["loss"]
    card = (export(full, place / "with a card").directory / "README.md").read_text()
    assert f"| validation loss | {loss:.4f} per pair |" in card and "nats" not in card


@pytest.mark.parametrize("name", ["full", "adapter None"])
def test_evaluate_says_what_the_run_says(place, full, name):
    if name != "full" and not (place / name).exists():
        train(recipe(place, name, LORA))
    last = steps_of(place / name, "validation")[-1]
    line = evaluate(place / name)[0].line
    figures = f"loss {last['loss']:.4f}, accuracy {last['accuracy']:.1%}, margin {last['margin']:.4g}"
    assert line == f"validation: step 10, {figures}, 3 pairs (3 of 12 samples)"


def test_a_model_that_no_run_made_has_no_reference(place, full):
    exported = export(full, place / "exported").directory
    (place / "recipe.yaml").write_text(to_yaml(recipe(place, "full")))
    with pytest.raises(UserError, match="only checkpoints record it"):
        evaluate(exported, recipe=str(place / "recipe.yaml"))


def test_the_routers_loss_is_refused_beside_pairs(place):
    """A mean over pairs has no place for a mean over tokens."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}
    model = {"from": None} | tiny.MODEL | {"family": "qwen3_moe", "router_aux_loss_coef": 0.1} | experts
    with pytest.raises(UserError, match=r"set model\.output_router_logits=false"):
        train(recipe(place, "experts", model=model))
