"""A run whose model and tokenizer are hub names: fetched once, pinned, and resumed without the hub."""

import os
import shutil
import subprocess
import sys

import pytest
import yaml

from tests import tiny
from tests.loopback import Hub
from tests.loopback import hub as hub  # a fixture
from windlass.config import check_recipe
from windlass.errors import AbsentSource, UserError
from windlass.model.open_config import model_directory
from windlass.training.preflight import make_ready, prepare_only
from windlass.training.start.drift import check_drift
from windlass.training.start.pins import fingerprint, keep_pins, pin_model, pins

COMMIT, OTHER = "1234567890" * 4, "a" * 40
NAMED = {"model": {"from": "org/tiny"}, "data": {"tokenizer": {"from": "org/tiny"}}}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A tiny sharded model with a tokenizer, as files of a repository; beside them what must not be fetched."""
    from tests.model.tiny import hf_model
    from windlass.data.tokenize import tokenizer as room

    base = tmp_path_factory.mktemp("published")
    texts = [path.read_text() for path in sorted(tiny.write_corpus(base / "corpus").iterdir())]
    room.save_trained(room.train_tokenizer(texts, 300), base / "tokenizer")
    hf_model("qwen3", True, vocab_size=300, eos_token_id=256).save_pretrained(base / "model", max_shard_size="200KB")
    files = {path.name: path.read_bytes() for part in ("tokenizer", "model") for path in (base / part).iterdir()}
    return base, {**files, "pytorch_model.bin": b"p", "original/model.safetensors": b"o"}


@pytest.fixture
def run(tmp_path, published):
    """`run(arguments)` starts windlass on a recipe that names the hub -> its output; `run.hub`, `run.directory`."""
    base, files = published
    tree = tiny.recipe(tmp_path, run={"steps": 2}, checkpoint={"every_steps": 2}).model_dump(mode="json", by_alias=True)
    tree["run"] = {key: tree["run"][key] for key in ("directory", "steps", "tokens_per_step", "micro_batch", "seed")}
    tree["model"] = NAMED["model"]
    tree["data"] |= {"tokenizer": NAMED["data"]["tokenizer"], "sources": [{"path": str(base / "corpus")}]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    with Hub() as hub:
        commit = hub.add("org/tiny", files)
        env = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}

        def start(*arguments, module=("-m", "windlass"), command="train", **changes):
            command = [sys.executable, *module, command, str(tmp_path / "recipe.yaml"), *arguments]
            done = subprocess.run(
                command, env={**env, **changes}, cwd=tmp_path, capture_output=True, text=True, timeout=1800
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout + done.stderr

        start.hub, start.commit, start.files, start.directory = hub, commit, files, tmp_path / "run"
        yield start


def fetched_once(run):
    wanted = [file for file in run.files if file.endswith((".json", ".safetensors")) and "/" not in file]
    assert len([file for file in wanted if file.endswith(".safetensors")]) > 1
    for file in wanted:
        assert run.hub.served(file) == [len(run.files[file])], file
    assert not any(run.hub.served(file) for file in run.files if file not in wanted)


@pytest.mark.long
def test_two_ranks_fetch_each_file_once_and_a_resume_needs_no_hub(run):
    run("--nproc", "2")
    fetched_once(run)
    resolved = yaml.safe_load((run.directory / "resolved.yaml").read_text())
    assert resolved["model"]["commit"] == resolved["data"]["tokenizer"]["commit"] == run.commit
    assert check_recipe(resolved).model.commit == run.commit, "a resolved recipe loads again, and is pinned"
    run.hub.add("org/tiny", {**run.files, "config.json": b"{}", "tokenizer.json": b"{}"})  # main moves
    run.hub.answers.clear()
    assert "from step 2 of" in run("run.steps=4")
    assert run.hub.answers == []
    assert yaml.safe_load((run.directory / "resolved.yaml").read_text())["model"]["commit"] == run.commit


@pytest.mark.long
def test_under_torchrun_each_file_is_fetched_once(run):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "windlass")
    run(module=torchrun)
    fetched_once(run)
    assert yaml.safe_load((run.directory / "resolved.yaml").read_text())["model"]["commit"] == run.commit


@pytest.mark.long
def test_prepare_fetches_all_that_a_run_without_a_network_needs(run, tmp_path, published):
    corpus, cache = tmp_path / "texts", tmp_path / "shared"
    shutil.copytree(published[0] / "corpus", corpus)
    settings = (f"hub.cache={cache}", f"data.sources=[{{path: {corpus}}}]")
    out = run(*settings, command="prepare")
    assert f"model.from org/tiny: commit {run.commit} in {cache}" in out
    fetched_once(run)
    assert not (tmp_path / "home" / "hub").exists(), "all of it is in hub.cache"
    run.hub.stop()
    shutil.rmtree(corpus)  # another machine: no network, no home, no sources
    out = run(*settings, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "other"))
    assert "main is " + run.commit[:12] in out and "is used as it was prepared: `path:" in out
    assert yaml.safe_load((run.directory / "resolved.yaml").read_text())["model"]["commit"] == run.commit


def test_what_prepare_fetched_is_found_without_a_network_and_what_is_missing_is_named(
    tmp_path, hub, published, monkeypatch, capsys
):
    base, files = published
    commit, cache = hub.add("org/tiny", files), tmp_path / "shared"
    shutil.copytree(base / "corpus", tmp_path / "texts")
    data = {"sources": [{"path": str(tmp_path / "texts")}]}
    config = recipe(tmp_path, data=data, hub={"cache": str(cache)})
    prepared = prepare_only(config)
    assert f"model.from org/tiny: commit {commit} in {cache}" in capsys.readouterr().out
    hub.add("org/tiny", {**files, "config.json": b"{}"})  # main moves
    hub.stop()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shutil.rmtree(tmp_path / "texts")
    ready = make_ready(config, 1, "cpu").config
    assert ready.model.commit == ready.data.tokenizer.commit == commit and cache in model_directory(ready.model).parents
    assert (
        f"{prepared.where} is used as it was prepared: `path: {tmp_path}/texts` matches no file"
        in capsys.readouterr().out
    )
    with pytest.raises(AbsentSource):
        prepare_only(config)
    (weights,) = cache.glob("*/snapshots/*/model-00001-*.safetensors")
    weights.unlink()
    with pytest.raises(UserError) as caught:
        make_ready(config, 1, "cpu")
    assert caught.value.given == (
        f"{weights.name} of org/tiny ({commit[:12]}) is not in the cache {cache}, and HF_HUB_OFFLINE is set"
    )
    assert caught.value.change.startswith("run `windlass prepare RECIPE` where there is a network")


def test_prepare_may_leave_weights_where_they_are(tmp_path, hub, published, capsys):
    base, files = published
    hub.add("org/tiny", files)
    prepare_only(recipe(tmp_path, data={"sources": [{"path": str(base / "corpus")}]}), with_weights=False)
    out = capsys.readouterr().out
    assert "data.tokenizer.from org/tiny: commit" in out and "model.from" not in out
    assert not any(hub.served(file) for file in files if file.endswith(".safetensors"))


def test_a_source_that_is_not_here_and_was_never_prepared_is_named(tmp_path):
    config = tiny.recipe(tmp_path, data={"sources": [{"path": str(tmp_path / "nowhere")}]})
    with pytest.raises(AbsentSource, match="nowhere` matches no file"):
        make_ready(config, 1, "cpu")


def recipe(tmp_path, model=None, tokenizer=None, data=None, **sections):
    named = {**dict.fromkeys(tiny.QWEN3_KEYS), "family": None, "from": "org/tiny", **(model or {})}
    given = {"tokenizer": {"from": "org/tiny", **(tokenizer or {})}, **(data or {})}
    return tiny.recipe(tmp_path, model=named, data=given, **sections)


def trainer_state(tmp_path, **model):
    pinned = recipe(tmp_path, model={"commit": COMMIT, **model}, tokenizer={"commit": COMMIT})
    return {"config": pinned.model_dump(mode="json", by_alias=True), "step": 4, "total_steps": tiny.STEPS}


def test_a_run_keeps_the_commit_it_began_with(tmp_path):
    kept = keep_pins(recipe(tmp_path), trainer_state(tmp_path))
    assert kept.model.commit == kept.data.tokenizer.commit == COMMIT
    assert check_drift(trainer_state(tmp_path), kept, None) == []
    same = keep_pins(recipe(tmp_path, model={"revision": COMMIT}), trainer_state(tmp_path, revision="v1"))
    assert check_drift(trainer_state(tmp_path, revision="v1"), same, None) == [], "the same commit by its own name"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"revision": "v2"}, "model.revision: v1 in the checkpoint, v2 now"),
        ({"revision": OTHER}, f"model.revision: v1 in the checkpoint, {OTHER} now"),
        ({"revision": "v1", "commit": OTHER}, f"model.commit: {COMMIT} in the checkpoint, {OTHER} now"),
        ({"from": "org/other", "revision": "v1"}, "model.from: org/tiny in the checkpoint, org/other now"),
    ],
)
def test_another_revision_is_drift(tmp_path, model, words):
    then = trainer_state(tmp_path, revision="v1")
    with pytest.raises(UserError) as caught:
        check_drift(then, keep_pins(recipe(tmp_path, model=model), then), None)
    assert words in str(caught.value)


def test_a_revision_where_there_was_none_is_drift(tmp_path):
    then = trainer_state(tmp_path)
    with pytest.raises(UserError, match=r"model\.revision: None in the checkpoint, v2 now"):
        check_drift(then, keep_pins(recipe(tmp_path, model={"revision": "v2"}), then), None)


def test_a_tokenizers_new_revision_may_be_accepted(tmp_path):
    accepted = {"accept_drift": ["data.tokenizer.revision", "data.tokenizer.commit"]}
    now = keep_pins(recipe(tmp_path, tokenizer={"revision": "v2"}, run=accepted), trainer_state(tmp_path))
    assert now.data.tokenizer.commit is None, "asked of the hub again"
    assert len(check_drift(trainer_state(tmp_path), now, None)) == 2


def test_pins_are_overrides_that_give_the_same_config(tmp_path):
    from windlass.recipe import apply_override

    pinned = recipe(tmp_path, model={"commit": COMMIT, "revision": "1.0"}, tokenizer={"commit": OTHER})
    plain = recipe(tmp_path)
    tree = plain.model_dump(mode="json", by_alias=True)
    for override in pins(pinned):
        apply_override(tree, override)
    assert check_recipe(tree) == pinned, "digits alone stay text"
    assert pins(plain) == []


def test_a_refusal_of_the_hub_costs_nothing(tmp_path, hub, published):
    config = recipe(tmp_path)
    hub.add("org/tiny", published[1], gated=True)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match="org/tiny is gated, and no token was sent"):
        make_ready(config, 1, "cpu")
    assert sorted(path for path in tmp_path.iterdir() if path.name != "cache") == before


def test_a_model_that_a_recipe_cannot_use_is_refused_before_its_weights_are_fetched(tmp_path, hub, published):
    hub.add("org/tiny", published[1])
    with pytest.raises(UserError, match="for a model of 64 positions"):
        make_ready(recipe(tmp_path, data={"sequence_length": 128}), 1, "cpu")
    assert not any(hub.served(file) for file in published[1] if file.endswith(".safetensors"))


def test_weights_that_do_not_fit_are_named_before_data_is_prepared(tmp_path, hub, published):
    files = {name: content for name, content in published[1].items() if "00001-of" not in name}
    hub.add("org/tiny", files)
    with pytest.raises(UserError, match="has no model-00001-of-"):
        make_ready(recipe(tmp_path), 1, "cpu")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda shard: shard.unlink(), "1 of 2 weight files are missing: model-00001-of-00002.safetensors"),
        (
            lambda shard: shard.write_bytes(shard.read_bytes()[:-100]),
            "a safetensors file is as long as its header says",
        ),
    ],
    ids=["absent", "cut"],
)
def test_a_half_copied_directory_is_named_before_data_is_prepared(tmp_path, published, damage, words):
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in published[1].items():
        if "/" not in name:
            (folder / name).write_bytes(content)
    damage(folder / "model-00001-of-00002.safetensors")
    here = {"from": str(folder)}
    with pytest.raises(UserError) as caught:
        make_ready(recipe(tmp_path, model=here, tokenizer=here), 1, "cpu")
    assert words in str(caught.value) and not (tmp_path / "data").exists()


def test_a_revision_of_a_directory_is_named(tmp_path, monkeypatch):
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="org/tiny is a directory here, and model has a revision"):
        pin_model(recipe(tmp_path, model={"revision": "v1"}))


def test_a_fingerprint_is_that_of_the_preparation_and_writes_nothing(tmp_path):
    config = tiny.recipe(tmp_path)
    before, files = fingerprint(config), sorted(tmp_path.rglob("*"))
    assert files == sorted(tmp_path.rglob("*")) and fingerprint(config) == before
    assert prepare_only(config).fingerprint == before == fingerprint(config)
    layout = tiny.recipe(tmp_path, run={"seed": 9}, data={"isolate": True})
    assert fingerprint(layout) == before, "neither the run nor what is decided while training"
    assert fingerprint(tiny.recipe(tmp_path, data={"sequence_length": 8})) != before
    source = min((tmp_path / "corpus").iterdir())
    source.write_text(source.read_text() + "more")
    assert fingerprint(config) != before
    shutil.rmtree(tmp_path / "corpus")
    with pytest.raises(AbsentSource):
        fingerprint(config)
