"""The model card: what it says is true, and what is not known is not said."""

import dataclasses
import json
import re
import shlex
import shutil
import sys

import pytest
import yaml

from windlass.checkpoint.verify import Checkpoint
from windlass.cli import main as cli
from windlass.commands.models.export import export
from windlass.commands.models.model_card import IN_LLAMA_CPP, base_license, front_matter, provenance, serving
from windlass.config import check_recipe
from windlass.model.families.family_table import FAMILIES
from windlass.training.start.base_model import FRONT_MATTER
from windlass.training.start.open_saved import open_saved


def read_card(directory):
    text = (directory / "README.md").read_text()
    return yaml.safe_load(FRONT_MATTER.match(text)[1]), text


def exporting(text):
    """The command that the card gives."""
    return shlex.split(text.split("exported by windlass")[1].split("`")[1])


def test_the_command_of_a_checkpoint_is_of_its_run(run, tmp_path, monkeypatch):
    """Whoever has the card has the recipe, whose run.directory is where it works; the checkpoint may have been copied away."""
    copied = shutil.copytree(run / "checkpoints" / "step-00000010", tmp_path / "copied")
    command = exporting(read_card(export(copied, tmp_path / "one").directory)[1])
    assert command[2:4] == [str(run), str(tmp_path / "one")]
    shutil.rmtree(tmp_path / "one")
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code in (0, None)
    assert exporting(read_card(tmp_path / "one")[1]) == command


def test_the_card_names_run_step_loss_code_data_and_versions(run, tmp_path):
    import torch

    front, text = read_card(export(run, tmp_path / "out", step=10).directory)
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["windlass", "qwen3", "pretrain"],
    }, "no license, base model or data set is known, so none is named"
    checkpoint = Checkpoint.open(run / "checkpoints" / "step-00000010")
    record = json.loads(checkpoint.read("provenance.json"))
    assert f"`{checkpoint.manifest.run_id}`, step 10 of 10" in text
    assert f"{checkpoint.manifest.metric:.4f} nats per token" in text
    assert record["git"]["commit"] in text and f"torch {torch.__version__}" in text
    assert "2 on 1 host" in text and record["hosts"][0] not in text.replace(str(run), "")
    assert exporting(text) == ["windlass", "export", str(run), str(tmp_path / "out"), "--dtype", "fp32", "--step", "10"]
    assert "the same greedy continuation, and the same token ids" in text


def test_the_recipe_in_the_card_loads_again(run, tmp_path):
    text = read_card(export(run, tmp_path / "out").directory)[1]
    recipe = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    saved = open_saved(run)
    assert check_recipe(recipe).model_dump(mode="json") == check_recipe(saved.trainer_state["config"]).model_dump(
        mode="json"
    )


def test_a_step_without_a_validation_says_so(run, tmp_path):
    assert "not measured at this step" in read_card(export(run, tmp_path / "out", step=3).directory)[1]


def saved_with(run, **model):
    saved = open_saved(run)
    config = {**saved.trainer_state["config"], "model": {"revision": None, "commit": None, **model}}
    trainer_state = {**saved.trainer_state, "config": config}
    return dataclasses.replace(saved, trainer_state=trainer_state)


@pytest.mark.parametrize(
    ("sections", "unit"),
    [
        ({}, "nats per token"),
        ({"data": {"sources": [{"path": "x", "format": "chat"}]}}, "nats per answer token"),
        ({"data": {"sources": [{"path": "x", "format": "chat"}, {"path": "y"}]}}, "nats per token"),
        ({"adapter": {"kind": "lora", "base": "nf4"}}, "nats per token, with the base in NF4"),
    ],
    ids=["text", "chats", "chats and text", "nf4"],
)
def test_the_loss_says_what_it_is_a_mean_over(run, sections, unit):
    """A merged model is not the one that was scored, where that had its base in NF4."""
    saved = open_saved(run)
    config = saved.trainer_state["config"]
    changed = {name: {**config[name], **keys} for name, keys in sections.items()}
    if "data" in sections:
        changed["data"]["tokenizer"] = {"from": "org/name"}
    if "adapter" in sections:
        changed["model"] = {"from": "org/name"}
    saved = dataclasses.replace(saved, trainer_state={**saved.trainer_state, "config": {**config, **changed}})
    metric = Checkpoint.open(saved.directory).manifest.metric
    assert provenance(saved, "fp32", [])["validation loss"] == f"{metric:.4f} {unit}"


def test_a_hub_name_is_the_base_model_and_a_directory_is_not(run, tmp_path):
    assert front_matter(saved_with(run, **{"from": "org/name"}))["base_model"] == "org/name"
    assert "base_model" not in front_matter(saved_with(run, **{"from": str(tmp_path)}))


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("---\nlicense: apache-2.0\n---\ntext", "apache-2.0"),
        ("license: mit", None),
        ("---\n: [\n---\n", None),
        ("---\r\nlicense: mit\r\n---\r\n", "mit"),
        ("", None),
    ],
)
def test_the_license_is_the_one_that_the_base_says(card, name):
    assert base_license(card.encode()) == name


def test_all_fields_of_the_model_stand_in_the_card(run, tmp_path):
    done = export(run, tmp_path / "out").directory
    shown = json.loads(read_card(done)[1].split("```json\n")[1].split("```")[0])
    assert shown == json.loads((done / "config.json").read_text())
    assert shown["rms_norm_eps"] == 1e-6 and "rms_norm_eps" not in read_card(done)[1].split("## Recipe")[1]


def test_a_converted_directory_has_a_card_without_a_run(run, exported, tmp_path):
    front, text = read_card(export(exported.directory, tmp_path / "out", dtype="bf16").directory)
    assert front["tags"] == ["windlass", "qwen3"] and "converted from a Hugging Face directory" in text
    assert "## Recipe" not in text and "| run |" not in text
    assert exporting(text) == ["windlass", "export", str(exported.directory), str(tmp_path / "out"), "--dtype", "bf16"]


def test_hub_data_sets_are_named(run):
    saved = saved_with(run, **{"from": None, "family": "qwen3"})
    saved.trainer_state["config"]["data"] = {"sources": [{"hub": "org/data"}, {"path": "x"}]}
    assert front_matter(saved)["datasets"] == ["org/data"]


def commands_of(text):
    return re.findall(r"```sh\n(.*)\n```", text)


def test_the_card_says_how_to_serve_the_model(run, tmp_path):
    """Its tokenizer was trained by the run: llama.cpp's converter stops at it, unless it is named."""
    text = read_card(export(run, tmp_path / "out").directory)[1]
    vllm, gguf = commands_of(text.split("## Serve it\n")[1].split("## Where it comes from\n")[0])
    assert vllm == 'vllm serve "PATH OR NAME"'
    python, option, program, *words = shlex.split(gguf)
    assert (python, option, words) == ("python", "-c", ["PATH OR NAME", "--outfile", "model.gguf"])
    compile(program, "card", "exec")
    assert 'TextModel.get_vocab_base_pre = lambda *_: "gpt-2"' in program


def test_a_run_that_has_the_tokenizer_of_an_export_has_its_command_for_llama_cpp(run, exported):
    """A chat run, a merged one, and an export of an export: the tokenizer is the same, and data.tokenizer.train is of one run."""
    first, second = open_saved(run), open_saved(run)
    second.trainer_state["config"]["data"]["tokenizer"] = {"from": str(exported.directory)}
    assert serving(first) == serving(second) == serving(open_saved(exported.directory))
    assert "get_vocab_base_pre" in serving(second)[1][1]


@pytest.mark.parametrize(
    ("changes", "gguf"),
    [
        ({}, 'python convert_hf_to_gguf.py "PATH OR NAME" --outfile model.gguf'),
        ({"window": 7, "window_layers": (0, 1)}, None),
        ({"unrotated_layers": (1,)}, None),
        ({"family": "smollm3", "num_layers": 8, "unrotated_layers": (3, 7)}, "python"),
        ({"family": "smollm3", "num_layers": 8, "unrotated_layers": (1, 3, 5, 7)}, None),
        ({"family": "gemma2"}, None),
    ],
    ids=["hub's tokenizer", "window", "unrotated", "smollm3", "another smollm3", "gemma2"],
)
def test_gguf_only_where_llama_cpp_computes_the_same(run, tmp_path, changes, gguf):
    saved = open_saved(run)
    found = json.loads((saved.tokenizer_directory / "tokenizer.json").read_text())
    normal = {**found, "normalizer": {"type": "NFC"}}  # another's: it splits as GPT-2's too, and the converter knows it
    (tmp_path / "tokenizer.json").write_text(json.dumps(normal))
    saved = dataclasses.replace(saved, tokenizer_directory=tmp_path)
    saved = dataclasses.replace(saved, architecture=dataclasses.replace(saved.architecture, **changes))
    (_, vllm), *rest = serving(saved)
    assert vllm == 'vllm serve "PATH OR NAME"' and len(rest) == (gguf is not None)
    assert all(command.startswith(gguf) for _, command in rest)


@pytest.mark.parametrize(("rank", "largest"), [(4, 16), (16, 16), (17, 32), (64, 64)])
def test_an_adapter_is_served_beside_its_base(run, rank, largest):
    saved = saved_with(run, **{"from": "org/name"})
    saved.trainer_state["base"] = {"from": "org/name"}
    saved.trainer_state["config"]["adapter"] = {"rank": rank, "also_train": []}
    ((_, command),) = serving(saved, is_adapter=True)
    assert command == (
        f'vllm serve org/name --enable-lora --max-lora-rank {largest} --lora-modules tuned="PATH OR NAME"'
    )
    saved.trainer_state["config"]["adapter"]["also_train"] = ["model.embed_tokens.weight"]
    assert serving(saved, is_adapter=True) == []


def test_every_family_of_llama_cpp_is_one_of_ours():
    assert set(FAMILIES) >= IN_LLAMA_CPP
