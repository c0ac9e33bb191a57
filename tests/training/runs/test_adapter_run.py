"""Whole runs with adapters: what they train, save, refuse and export; every command that reads their checkpoints."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny
from windlass.checkpoint.keep import diff
from windlass.cli.models import export as cli_export
from windlass.commands.models import export_adapter
from windlass.commands.models.evaluate import evaluate
from windlass.commands.models.export import export
from windlass.commands.models.export_adapter import probe_ids, write_adapter
from windlass.commands.models.generate import generate
from windlass.commands.models.sampling import Sampling
from windlass.config import to_yaml
from windlass.errors import UserError
from windlass.model.lora.linear import merge
from windlass.training.loop import train
from windlass.training.start.drift import check_drift
from windlass.training.start.open_saved import open_saved, read_trainer_state

ADAPTERS = {
    "lora": {"kind": "lora", "rank": 4, "alpha": 8},
    "nf4": {"kind": "lora", "rank": 4, "alpha": 8, "base": "nf4"},
    "some": {"kind": "lora", "rank": 2, "alpha": 8, "targets": ["q_proj", "down_proj"], "also_train": ["*norm*"]},
}


FP32 = {"policy": "fp32"}  # what `auto` is on a CPU, as the checkpoints name it


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.write_base(tmp_path_factory.mktemp("base") / "model")


def recipe(directory, base, kind, name="run", **sections):
    """`kind`: a name of ADAPTERS."""
    given = {"model": dict.fromkeys(tiny.MODEL) | {"from": str(base)}, "adapter": ADAPTERS[kind]}
    return tiny.recipe(directory, name, **(given | sections))


@pytest.fixture(scope="module")
def runs(base, tmp_path_factory):
    """Directory with a finished run of each adapter, all on the same data."""
    directory = tmp_path_factory.mktemp("adapters")
    for name in ADAPTERS:
        train(recipe(directory, base, name, name))
    return directory


def tensors_of(run, step=tiny.STEPS):
    index = json.loads((run / "checkpoints" / f"step-{step:08d}" / "index.json").read_text())["tensors"]
    return {name: tensor["shape"] for name, tensor in index.items()}


@pytest.mark.parametrize("name", ["lora", "nf4"])
def test_a_checkpoint_holds_the_factors_and_their_states_alone(runs, name):
    tensors = tensors_of(runs / name)
    weights = {tensor for tensor in tensors if tensor.startswith("model.")}
    assert len(weights) == 2 * 7 * 2 and all(".lora_" in tensor for tensor in tensors)
    elements = sum(torch.Size(tensors[tensor]).numel() for tensor in weights)
    states = [tensor for tensor in tensors if tensor.endswith((".exp_avg", ".exp_avg_sq"))]
    assert sum(torch.Size(tensors[tensor]).numel() for tensor in states) == 2 * elements, "12 bytes per trained element"
    assert len(tensors) == 4 * len(weights), "and a counter of 4 bytes per tensor"


def test_what_is_trained_whole_is_kept_too(runs):
    weights = {name for name in tensors_of(runs / "some") if name.startswith("model.")}
    norms = {name for name in weights if "norm" in name}
    assert len(norms) == 2 * 4 + 1 and len(weights - norms) == 2 * 2 * 2


def test_the_announcement_says_how_much_is_trained(runs):
    derived = tiny.lines(runs / "lora")[0]["derived"]
    assert derived["adapter"] == "LoRA of rank 4 beside 14 matrices, scale 2"
    trained = 2 * 4 * (2 * (64 + 128) + 2 * (64 + 64) + 3 * (64 + 128))
    assert derived["trainable"].startswith(f"{trained:,} of ")
    assert tiny.lines(runs / "nf4")[0]["derived"]["adapter"].endswith(", base in NF4")


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_run_that_was_killed_ends_bit_for_bit_where_the_whole_one_does(runs, base, name):
    resumed = runs / f"{name} resumed"
    shutil.copytree(runs / name, resumed)
    for step in (6, 9, 10):
        shutil.rmtree(resumed / "checkpoints" / f"step-{step:08d}")
    train(recipe(runs, base, name, resumed.name))
    assert not diff(*(run / "checkpoints" / "step-00000010" for run in (runs / name, resumed))).bytes


def test_commands_read_an_adapter(runs):
    line = evaluate(runs / "lora", sequences=6)[0].line
    logged = [event for event in tiny.lines(runs / "lora") if event["kind"] == "validation"][-1]
    assert f"loss {logged['loss']:.4f}" in line
    assert len(generate(runs / "nf4", ["wind"], Sampling(max_tokens=4, temperature=0))) == 1


@pytest.mark.parametrize("name", ADAPTERS)
def test_peft_loads_the_export(runs, name, tmp_path):
    done = export(runs / name, tmp_path / "adapter")
    assert done.largest_difference <= 1e-5 and done.base is not None
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "PeftModel.from_pretrained(base" in card and ("quantised to NF4" in card) == (name == "nf4")
    assert done.merging is not None and (done.merging.in_nf4 is not None) == (name == "nf4")


@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_it_is_a_model_like_any_other(runs, name, tmp_path):
    done = export(runs / name, tmp_path / "merged", merge=True)
    assert done.largest_difference <= 1e-5 and done.base is None
    card = (tmp_path / "merged" / "README.md").read_text()
    assert done.merging is not None and 0 < done.merging.beside <= 1e-5, (
        "sums in another order: not the same weights twice"
    )
    assert f"Merged in fp32, it was within {done.merging.beside:.1e} of the logits of base and adapter." in card
    if name == "nf4":
        before, after = (open_saved(path).model for path in (runs / name, tmp_path / "merged"))
        ids_BT = probe_ids(open_saved(runs / name).architecture)
        expected = (before(ids_BT) - after(ids_BT)).abs().max().item()
        assert done.merging.in_nf4 == pytest.approx(expected, rel=1e-3) and expected > 1e-3
        assert f"logits differ by {expected:.1e} from the trained model's" in card


def test_the_console_says_what_was_compared_with_what(runs, tmp_path, capsys):
    cli_export(runs / "nf4", tmp_path / "merged", merge=True)
    whole, merging, nf4 = capsys.readouterr().out.splitlines()
    assert re.search(
        r"merged: fp32; loads in transformers, logits within \d\.\de[+-]\d\d of ours, same greedy text$", whole
    )
    assert re.fullmatch(r"merged in fp32: logits within [1-9]\.\de-\d\d of the base with its adapter", merging)
    assert nf4.startswith("the base was in NF4 in training and is as before here: logits differ by ")
    cli_export(runs / "some", tmp_path / "adapter")
    (line,) = capsys.readouterr().out.splitlines()
    assert "adapter; loads in PEFT beside" in line


def test_a_wrong_merge_is_not_exported(runs, tmp_path, monkeypatch):
    def doubled(model, factors, adapter):
        merge(model, factors, replace(adapter, scale=2 * adapter.scale))

    monkeypatch.setattr(export_adapter, "merge", doubled)
    message = refusal(export, runs / "nf4", tmp_path / "merged", merge=True)
    assert (
        "merging the adapter of" in message and "nothing was exported" in message and not (tmp_path / "merged").exists()
    )


@pytest.fixture(scope="module")
def adapter(runs):
    """PEFT's files of the run `lora`."""
    return export(runs / "lora", runs / "as PEFT").directory


def write_recipe(runs, base, **sections):
    file = runs / "recipe.yaml"
    file.write_text(to_yaml(recipe(runs, base, "lora", **sections)))
    return str(file)


def test_an_adapters_directory_says_what_its_run_says(runs, base, adapter, tmp_path):
    greedy = Sampling(max_tokens=8, temperature=0)
    (said,) = generate(runs / "lora", ["the wind"], greedy)
    assert generate(adapter, ["the wind"], greedy) == [said]
    file = write_recipe(runs, base)
    line = evaluate(runs / "lora", sequences=6)[0].line
    again = evaluate(adapter, sequences=6, recipe=file)[0].line
    assert again.replace("validation: ", f"validation: step {tiny.STEPS}, ") == line
    whole = evaluate(export(adapter, tmp_path / "merged", merge=True).directory, sequences=6, recipe=file)[0].line
    assert whole.split(", perplexity")[0] == again.split(", perplexity")[0]
    alone = evaluate(with_tokenizer(base, adapter, tmp_path), sequences=6, recipe=file)[0].line
    assert alone != whole, "the base without the adapter"


@pytest.mark.parametrize(("given", "is_here"), [("base", True), ("org/base", False)])
def test_a_base_on_this_host_is_named_by_its_whole_path(adapter, runs, tmp_path, monkeypatch, given, is_here):
    """As a run names it that was started beside its base; the adapter is then read from anywhere."""
    saved = open_saved(runs / "lora")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "draft").mkdir()
    state = {**saved.trainer_state, "base": {**saved.trainer_state["base"], "from": given}}
    write_adapter(tmp_path / "draft", replace(saved, trainer_state=state))
    config = json.loads((tmp_path / "draft" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == (str(tmp_path / "base") if is_here else given)


def with_tokenizer(base, adapter, tmp_path):
    copied = shutil.copytree(base, tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(adapter / name, copied)
    return copied


def test_an_adapter_finds_its_base_and_its_tokenizer(base, adapter, tmp_path):
    own = with_tokenizer(base, adapter, tmp_path)
    copied = shutil.copytree(adapter, tmp_path / "adapter")
    said = generate(copied, ["the"], Sampling(4, 0.0))
    file = copied / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "base_model_name_or_path": str(tmp_path / "gone")}))
    assert f"the base of {copied} is not at {tmp_path / 'gone'}" in refusal(generate, copied, ["a"], Sampling())
    assert generate(copied, ["the"], Sampling(4, 0.0), base=own) == said
    (copied / "tokenizer.json").unlink()
    assert generate(copied, ["the"], Sampling(4, 0.0), base=own) == said, "the base's tokenizer"
    assert "has no tokenizer.json" in refusal(generate, copied, ["a"], Sampling(), base=base)
    file.write_text(json.dumps({**config, "base_model_name_or_path": None}))
    assert "base_model_name_or_path: None" in refusal(generate, copied, ["a"], Sampling())
    file.write_text(json.dumps({**config, "use_dora": True}))
    message = refusal(generate, copied, ["a"], Sampling(), base=own)
    assert "has use_dora" in message and "--merge" in message
    other = tiny.write_base(tmp_path / "other", num_hidden_layers=3)
    file.write_text(json.dumps(config))
    assert "it has no base_model.model.model.layers.2" in refusal(generate, copied, ["a"], Sampling(), base=other)


def test_what_is_no_model_is_named(runs, adapter, tmp_path):
    for path, what in (
        (tmp_path, "is empty"),
        (tmp_path / "none", "does not exist"),
        (runs / "corpus", "holds no model"),
    ):
        for command in (lambda path: generate(path, ["a"], Sampling()), evaluate):
            message = refusal(command, path)
            assert f"{path} {what}" in message and "config.json" in message and "adapter_config.json" in message
    assert "has no recipe" in (message := refusal(evaluate, adapter)) and "--recipe" in message
    assert "already an adapter in PEFT's format" in refusal(export, adapter, tmp_path / "x")


def test_data_of_another_tokenizer_is_refused(runs, base, adapter, tmp_path):
    copied = shutil.copytree(adapter, tmp_path / "adapter")
    tokenizer = json.loads((copied / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, two = list(vocabulary)[5:7]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (copied / "tokenizer.json").write_text(json.dumps(tokenizer))
    file = write_recipe(runs, base)
    assert "made by another tokenizer" in refusal(evaluate, copied, recipe=file)
    (copied / "tokenizer.json").unlink()
    assert f"{base} has no tokenizer.json" in refusal(evaluate, copied, recipe=file)


def test_an_adapter_beside_another_base_is_warned_of(runs, base, adapter, tmp_path, capsys):
    """An exported adapter names the hashes of its base; what PEFT saves has none, and nothing is known of it."""
    other = tmp_path / "other"
    shutil.copytree(base, other)
    generate(adapter, ["wind"], Sampling(1), base=other)
    assert "warning" not in capsys.readouterr().err, "the same files in another place"
    weights = load_file(other / "model.safetensors")
    save_file(weights, other / "model.safetensors", metadata={"format": "pt", "saved": "again"})
    generate(adapter, ["wind"], Sampling(1), base=other)
    words = f"warning: {other} is not the base that the adapter in {adapter} was trained beside"
    assert words in capsys.readouterr().err
    train(recipe(tmp_path, other, "lora", adapter={"kind": "lora", "from": str(adapter)}, run={"steps": 2}))
    assert words in capsys.readouterr().out
    copied = tmp_path / "by PEFT"
    shutil.copytree(adapter, copied)
    factors = load_file(adapter / "adapter_model.safetensors")
    save_file(factors, copied / "adapter_model.safetensors", metadata={"format": "pt"})
    generate(copied, ["wind"], Sampling(1), base=other)
    assert "warning" not in capsys.readouterr().err
    (copied / "adapter_model.safetensors").write_bytes(b"no file")
    assert "an adapter's factors are one safetensors file" in refusal(
        generate, copied, ["wind"], Sampling(1), base=base
    )


@pytest.mark.parametrize("name", ["lora", "some"])
def test_a_run_goes_on_from_an_exported_adapter(runs, base, tmp_path, name):
    """With what it trained whole; a run that resumes asks for its files no more."""
    export(runs / name, tmp_path / "adapter")
    given = {"kind": "lora", "from": str(tmp_path / "adapter")}
    train(recipe(tmp_path, base, name, "from", adapter=given, run={"steps": 2}))
    then, now = tiny.lines(runs / name), tiny.lines(tmp_path / "from")
    last = [line["loss"] for line in then if line["kind"] == "validation"][-1]
    first = next(line["loss"] for line in now if line["kind"] == "validation")
    assert first == pytest.approx(last, abs=1e-6)
    expected = tiny.lines(runs / name)[0]["derived"]["adapter"]
    assert now[0]["derived"]["adapter"] == f"{expected}; begun with {tmp_path / 'adapter'}, made beside {base}"
    shutil.rmtree(tmp_path / "adapter")
    train(recipe(tmp_path, base, name, "from", adapter=given, run={"steps": 3}))
    assert tensors_of(tmp_path / "from", 3).keys() == tensors_of(runs / name).keys()
    again = [line for line in tiny.lines(tmp_path / "from") if "derived" in line][-1]
    assert again["derived"]["adapter"] == f"{expected}; begun with {tmp_path / 'adapter'}"


def refusal(function, *args, **kwargs):
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def test_another_base_is_refused_and_a_moved_one_is_found(runs, base, tmp_path):
    own = tmp_path / "model"
    shutil.copytree(base, own)
    train(recipe(runs, own, "lora", "moved", run={"steps": 3}))
    other = tmp_path / "elsewhere"
    own.rename(other)
    message = refusal(generate, runs / "moved", ["a"], Sampling(1))
    assert f"not at {own}" in message and "--base DIR" in message
    assert generate(runs / "moved", ["a"], Sampling(1), base=other)
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    message = refusal(generate, runs / "moved", ["a"], Sampling(1), base=other)
    assert f"{other} is not the base" in message and f"in {own}" in message and "model.safetensors has hash" in message
    other.rename(own)
    message = refusal(train, recipe(runs, own, "lora", "moved", run={"steps": 6}))
    assert "is not the base that this adapter was trained beside" in message


def test_a_run_goes_on_beside_a_base_that_has_moved(runs, base, tmp_path):
    """Bit for bit as beside the one that it began with. What differs there is refused before anything is written."""
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(base, elsewhere)
    resumed = runs / "lora elsewhere"
    shutil.copytree(runs / "lora", resumed)
    for step in (9, 10):
        shutil.rmtree(resumed / "checkpoints" / f"step-{step:08d}")
    train(recipe(runs, elsewhere, "lora", resumed.name))
    last = "checkpoints/step-00000010"
    assert not diff(runs / "lora" / last, resumed / last).bytes
    assert read_trainer_state(resumed / last)["base"]["from"] == str(elsewhere)
    begun = [line for line in tiny.lines(resumed) if "drift" in line][-1]
    assert begun["drift"] == [f"moved base: model.from: {base} in the checkpoint, {elsewhere} now"]

    shutil.rmtree(resumed / last)
    before = sorted(path.name for path in (resumed / "checkpoints").iterdir())
    weights = elsewhere / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "is not the base that" in refusal(train, recipe(runs, elsewhere, "lora", resumed.name))
    shutil.rmtree(elsewhere)
    message = refusal(train, recipe(runs, elsewhere, "lora", resumed.name))
    assert f"the base of this adapter is not at {elsewhere}" in message
    assert "set model.from to where it is now" in message
    assert sorted(path.name for path in (resumed / "checkpoints").iterdir()) == before


def test_options_that_do_not_fit(runs, tmp_path):
    assert "exported in fp32" in refusal(export, runs / "lora", tmp_path / "x", dtype="bf16")
    train(tiny.recipe(runs, "no adapter", run={"steps": 2}))
    assert "this model has none" in refusal(export, runs / "no adapter", tmp_path / "x", merge=True)
    assert "it has no base" in refusal(generate, runs / "no adapter", ["a"], Sampling(), base=tmp_path)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": tiny.MODEL}, "adapter.kind=lora without model.from"),
        ({"optim": {"kind": "muon"}}, "optim.kind=muon with adapter.kind=lora"),
        ({"adapter": {"kind": "none", "rank": 8}}, "adapter.rank with adapter.kind=none"),
        ({"adapter": {"kind": "lora", "targets": []}}, "adapter.targets=[]"),
        ({"adapter": {"kind": "lora", "targets": "q_proj"}}, "use adapter.targets=[q_proj]"),
        (
            {"adapter": {"kind": "lora", "targets": ".*_proj"}},
            "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]",
        ),
        ({"adapter": {"kind": "lora", "rank": 0}}, "leave the section `adapter` out to train all parameters"),
    ],
)
def test_recipes_that_are_refused_when_they_are_read(base, tmp_path, sections, words):
    assert words in refusal(lambda: recipe(tmp_path, base, "lora", **sections))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"adapter": {"kind": "lora", "targets": ["query"]}}, "adapter.targets has 'query'"),
        (
            {"adapter": {"kind": "lora", "targets": [".*mlp.*"]}},
            "what this one finds here: gate_proj, up_proj, down_proj",
        ),
        ({"adapter": {"kind": "lora", "also_train": ["*nrm*"]}}, "adapter.also_train has '*nrm*'"),
        ({"adapter": ADAPTERS["lora"] | {"also_train": ["*q_proj*"], "targets": ["q_proj"]}}, "adapter.also_train too"),
        (
            {"optim": {"groups": [{"names": ["*norm*"], "frozen": True}]}},
            "an adapter freezes the model's own parameters; ",
        ),
        ({"optim": {"groups": [{"names": ["*q_proj.weight"], "frozen": True}]}}, 'also_train=["*q_proj.weight"]'),
        ({"optim": {"groups": [{"names": ["*nrm*"], "frozen": True}]}}, "this one matches none"),
        ({"adapter": {"kind": "lora", "from": "nowhere"}}, "adapter.from=nowhere"),
    ],
)
def test_recipes_that_are_refused_beside_the_model(base, tmp_path, sections, words):
    assert words in refusal(train, recipe(tmp_path, base, "lora", **sections))
    assert not (tmp_path / "run").exists()


def test_rates_of_their_own_for_the_second_factors(runs, base):
    """LoRA+."""
    groups = [{"names": ["*lora_B*"], "learning_rate_scale": 1e-30}]
    train(
        recipe(
            runs,
            base,
            "lora",
            "plus",
            run={"steps": 2},
            optim={"groups": groups},
            checkpoint={"keep_steps": [0], "every_steps": 1},
        )
    )
    then, now = (dict(open_saved(runs / "plus", step).model.named_parameters()) for step in (0, 1))
    moved = {name: float((now[name] - then[name]).detach().abs().max()) for name in now if ".lora_" in name}
    assert all((value < 1e-20) == ("lora_B" in name) for name, value in moved.items())


def test_nf4_needs_rows_of_whole_blocks(base, tmp_path):
    narrow = tiny.write_base(tmp_path / "narrow", hidden_size=40)
    message = refusal(train, recipe(tmp_path, narrow, "nf4"))
    assert "adapter.base=nf4 for matrices of 40 inputs" in message and "adapter.base=plain" in message


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        (
            {"kind": "none"},
            "adapter.kind: lora in the checkpoint, none now; adapter.rank: 4 in the checkpoint, 16 now; adapter.alpha",
        ),
        ({**ADAPTERS["lora"], "rank": 2}, "adapter.rank: 4 in the checkpoint, 2 now"),
        ({**ADAPTERS["lora"], "targets": ["q_proj"]}, "adapter.targets: all-linear in the checkpoint, ['q_proj'] now"),
        ({**ADAPTERS["lora"], "also_train": ["*norm*"]}, "adapter.also_train: [] in the checkpoint, ['*norm*'] now"),
    ],
)
def test_what_decides_which_tensors_there_are_cannot_be_accepted(runs, base, given, listed):
    accepted = {"accept_drift": [f"adapter.{key}" for key in ("kind", "rank", "alpha", "targets", "also_train")]}
    state = read_trainer_state(runs / "lora" / "checkpoints" / f"step-{tiny.STEPS:08d}")
    for run in ({}, accepted):
        with pytest.raises(UserError) as caught:
            check_drift(state, recipe(runs, base, "lora", "lora", adapter=given, run=run, precision=FP32), None)
        assert caught.value.given.startswith(listed) and caught.value.rule.startswith("a run keeps its adapter")
        assert "accept_drift" not in caught.value.change
        assert f"windlass export {runs / 'lora'} TARGET --merge, then model.from=TARGET" in caught.value.change


def test_of_an_adapter_what_changes_no_tensor_may_be_accepted(runs, base):
    state = read_trainer_state(runs / "lora" / "checkpoints" / f"step-{tiny.STEPS:08d}")
    with pytest.raises(UserError, match=r"'run.accept_drift=\[adapter.alpha, optim.learning_rate\]'"):
        changed = {"adapter": {**ADAPTERS["lora"], "alpha": 16}, "optim": {"learning_rate": 1e-3}, "precision": FP32}
        check_drift(state, recipe(runs, base, "lora", "lora", **changed), None)
