"""What a checkpoint keeps of the model that its run began from: an export needs neither the hub nor its cache."""

import json
import shutil

import pytest
import yaml

from tests import tiny
from tests.loopback import hub as hub  # a fixture
from windlass.commands.models.export import export
from windlass.model.open_config import model_directory
from windlass.training.loop import train
from windlass.training.start.base_model import (
    FRONT_MATTER,
    KEPT_CARD,
    KEPT_GENERATION,
    complete_adapter,
    kept_base_files,
    read_base,
)
from windlass.training.start.pins import fetch_base_weights, pin_model

CARD = "---\nlicense: apache-2.0\ntags: [x]\n---\n# A long story\n"


def test_an_export_says_what_the_base_said_though_hub_and_cache_are_gone(hub, ranks, tmp_path, exported):
    files = {path.name: path.read_bytes() for path in exported.directory.iterdir()}
    sampling = json.dumps({**json.loads(files["generation_config.json"]), "temperature": 0.6, "do_sample": True})
    hub.add("org/tiny", {**files, "README.md": CARD, "generation_config.json": sampling})
    named = {**dict.fromkeys(tiny.QWEN3_KEYS), "family": None, "from": "org/tiny"}
    config = pin_model(tiny.recipe(tmp_path, run={"steps": 1}, optim={"warmup_steps": 0}, model=named))
    fetch_base_weights(config)
    local = {**named, "from": str(model_directory(config.model))}
    config = tiny.recipe(tmp_path, run={"steps": 1}, optim={"warmup_steps": 0}, model=local)
    ranks.run(1, tiny.train, config)
    shutil.rmtree(tmp_path / "cache")
    first = config.run.directory / "checkpoints" / "step-00000001"
    check(first, export(config.run.directory).directory)

    longer = tiny.recipe(tmp_path, run={"steps": 2}, optim={"warmup_steps": 0}, model=local)
    shutil.rmtree(config.run.directory / "export")
    ranks.run(1, tiny.train, longer)
    check(first.with_name("step-00000002"), export(config.run.directory).directory)


def test_an_adapters_run_fetches_its_base_on_a_machine_that_has_not_got_it(hub, tmp_path, exported):
    """A checkpoint holds factors alone. Every start reads the base; a run without an adapter reads it once."""
    files = {path.name: path.read_bytes() for path in exported.directory.iterdir()}
    hub.add("org/tiny", files)
    given = {"run": {"steps": 1}, "optim": {"warmup_steps": 0}, "model": {**dict.fromkeys(tiny.QWEN3_KEYS)}}
    given["model"] |= {"family": None, "from": "org/tiny"}
    for name, adapter, fetched in (("whole", {}, 1), ("lora", {"kind": "lora", "rank": 2}, 2)):
        config = tiny.recipe(tmp_path, name, **given, adapter=adapter)
        hub.answers.clear()
        for steps in (1, 2):
            train(config.with_steps(steps))
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        assert len(hub.served("model.safetensors")) == fetched, name
        assert len(tiny.losses(config.run.directory)) == 2


KEPT = {"rank": 3, "alpha": 5.0, "rank_stabilized": True, "targets": ["v_proj"], "also_train": ["*norm*"]}


@pytest.mark.parametrize("name", KEPT)
def test_a_resumed_adapter_is_as_the_run_began_though_its_files_are_gone(tmp_path, name):
    tiny.write_base(tmp_path / "base")
    model = dict.fromkeys(tiny.MODEL) | {"from": str(tmp_path / "base")}
    config = tiny.recipe(tmp_path, model=model, adapter={"kind": "lora", "from": str(tmp_path / "gone")})
    then = {"config": {"adapter": config.adapter.model_dump() | KEPT}}
    assert getattr(complete_adapter(config, then).adapter, name) == KEPT[name] != getattr(config.adapter, name)


def check(checkpoint, directory):
    assert kept_base_files(checkpoint)[KEPT_CARD].decode() == CARD.split("#")[0], "the front matter alone"
    said = json.loads((directory / "generation_config.json").read_text())
    assert said["temperature"] == 0.6 and said["do_sample"] is True
    front = yaml.safe_load(FRONT_MATTER.match((directory / "README.md").read_text())[1])
    assert front["license"] == "apache-2.0"


def test_a_base_that_says_nothing_leaves_nothing(tmp_path):
    assert read_base(tmp_path) == {}
    (tmp_path / "README.md").write_text("license: mit")
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_base(tmp_path) == {KEPT_GENERATION: b"{}"}
