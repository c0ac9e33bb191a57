"""An export is what transformers loads, with the same numbers; nothing is overwritten."""

import json
import re
import shutil

import pytest
import torch

from tests.cases import write_model
from tests.commands.command_line import run_command
from tests.live_bytes import LiveBytes
from windlass.commands.models.export import PROBE_TEXT, export, keep, replace
from windlass.commands.models.generate import generate
from windlass.commands.models.sampling import Sampling
from windlass.data.tokenize.tokenizer import open_tokenizer, save_trained, train_tokenizer, vocab_size_of
from windlass.errors import UserError
from windlass.training.start.open_saved import open_saved


def test_an_export_loads_in_transformers_with_the_same_logits_and_text(run, exported, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert exported.directory == run / "export" and exported.largest_difference <= 1e-5
    (block,) = re.findall("```python\n(.*?)```", (exported.directory / "README.md").read_text(), re.S)
    exec(block.replace("PATH OR NAME", str(exported.directory)), {})
    assert capsys.readouterr().out.startswith("A text begins")
    theirs = AutoModelForCausalLM.from_pretrained(exported.directory)
    tokenizer = AutoTokenizer.from_pretrained(exported.directory)
    saved = open_saved(run)
    ids = tokenizer("the ship and the anchor", return_tensors="pt").input_ids
    with torch.no_grad():
        assert (theirs(ids).logits - saved.model(ids)).abs().max() <= 1e-5
    text = theirs.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    (ours,) = generate(run, ["the ship and the anchor"], Sampling(max_tokens=20, temperature=0))
    assert tokenizer.decode(text, skip_special_tokens=True) == ours
    eos = open_tokenizer(exported.directory)[1]
    assert theirs.config.eos_token_id == eos == tokenizer.eos_token_id
    assert theirs.config.vocab_size == 300, "the padding of the vocabulary is trimmed"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_smaller_dtype_is_compared_as_it_is_written(run, tmp_path, dtype):
    half = export(run, tmp_path / "half", dtype=dtype)
    assert half.largest_difference <= 1e-5, "fp32 from the rounded weights on both sides"
    sizes = [(path / "model.safetensors").stat().st_size for path in (half.directory, run / "export")]
    assert 0.4 < sizes[0] / sizes[1] < 0.7
    said = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    assert json.loads((half.directory / "config.json").read_text())["dtype"] == said
    from transformers import AutoModelForCausalLM

    assert str(AutoModelForCausalLM.from_pretrained(half.directory).dtype) == f"torch.{said}"


def test_shards_have_an_index_and_load(run, exported, tmp_path):
    from transformers import AutoModelForCausalLM

    done = export(run, tmp_path / "shards", max_shard_bytes=10_000)
    index = json.loads((done.directory / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in done.directory.glob("*.safetensors"))
    assert shards == sorted(set(index["weight_map"].values())) and len(shards) > 2
    whole, parts = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (run / "export", done.directory)
    )
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_the_generation_config_of_the_base_stays_with_this_models_ids(tmp_path, exported):
    base = tmp_path / "base"
    shutil.copytree(exported.directory, base)
    kept = json.loads((base / "generation_config.json").read_text()) | {"temperature": 0.6, "do_sample": True}
    (base / "generation_config.json").write_text(json.dumps({**kept, "eos_token_id": 299, "pad_token_id": 7}))
    done = export(base, tmp_path / "again")
    said = json.loads((done.directory / "generation_config.json").read_text())
    assert said["temperature"] == 0.6 and said["do_sample"] is True
    assert said["eos_token_id"] == json.loads((base / "config.json").read_text())["eos_token_id"] != 299


TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.mark.parametrize("where", ["file", "field"])
def test_a_chat_template_is_in_both_places(tmp_path, exported, where):
    from transformers import AutoTokenizer

    base = tmp_path / "base"
    shutil.copytree(exported.directory, base)
    if where == "file":
        (base / "chat_template.jinja").write_text(TEMPLATE)
    else:
        config = json.loads((base / "tokenizer_config.json").read_text())
        (base / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    done = export(base, tmp_path / "again").directory
    assert (done / "chat_template.jinja").read_text() == TEMPLATE
    assert json.loads((done / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE
    said = AutoTokenizer.from_pretrained(done).apply_chat_template(
        [{"role": "user", "content": "pull"}], tokenize=False
    )
    assert said == "pull"


def test_gpt2_is_what_gpt2s_own_classes_read(ranks, tmp_path):
    from transformers import GPT2LMHeadModel, GPT2Tokenizer

    from tests import tiny

    sizes = {"family": "gpt2", "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 48}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = tiny.recipe(
        tmp_path,
        run={"steps": 1},
        optim={"warmup_steps": 0},
        model={**dict.fromkeys(tiny.QWEN3_KEYS), **sizes, **dropouts},
    )
    ranks.run(1, tiny.train, config)
    done = export(config.run.directory)
    assert done.largest_difference <= 1e-5
    model, report = GPT2LMHeadModel.from_pretrained(done.directory, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.transformer.h[0].attn.c_attn.weight.shape == (24, 72), "input by output, as GPT-2 stores it"
    names = [path.name for path in done.directory.iterdir()]
    assert {"vocab.json", "merges.txt", "tokenizer.json", "config.json", "generation_config.json"} <= set(names)
    theirs, (ours, eos_id) = GPT2Tokenizer.from_pretrained(done.directory), open_tokenizer(done.directory)
    assert theirs("the ship, 船").input_ids == ours.encode("the ship, 船").ids and theirs.eos_token_id == eos_id
    assert json.loads((done.directory / "vocab.json").read_text())["<|endoftext|>"] == eos_id
    assert theirs.model_max_length == 48


def test_a_tokenizer_that_transformers_reads_differently_is_not_exported(tmp_path, exported):
    base = tmp_path / "base"
    shutil.copytree(exported.directory, base)
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True})
    )
    with pytest.raises(UserError, match="transformers reads the exported tokenizer as another one") as caught:
        export(base, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    assert caught.value.change.startswith("nothing was exported; report this with tokenizer_config.json")


def test_a_type_whose_tokenizer_transformers_takes_from_no_file_is_named_with_what_to_train(tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    base = tmp_path / "base"
    save_trained(train_tokenizer([PROBE_TEXT], 400), base)  # learns what Qwen2's rules would cut
    tokenizer, eos_id = open_tokenizer(base)
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": vocab_size_of(tokenizer)}
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, eos_token_id=eos_id)).save_pretrained(base)
    with pytest.raises(UserError, match=r"as another one \(Qwen2Tokenizer") as caught:
        export(base, tmp_path / "again")
    assert "takes Qwen2Tokenizer for every model of type qwen2" in caught.value.change


SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_model_is_in_memory_and_one_tensor_beside_it(tmp_path, dtype):
    """Counted, the activations of the probe too: 2.0 models in fp32 and 1.5 in bf16 where a shard was collected before it was
    written, and rounding gave every tensor new memory twice."""
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
    model, largest = (pick(one.nbytes for one in theirs.parameters()) for pick in (sum, max))
    theirs.save_pretrained(tmp_path / "in")
    with LiveBytes() as live:
        export(tmp_path / "in", tmp_path / "out", dtype=dtype)
    assert model < live.peak < model + 2 * largest < 1.2 * model


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_directory_of_bf16_comes_back_byte_for_byte(tmp_path, family):
    from safetensors.torch import load_file

    from tests.model.tiny import hf_model

    hf_model(family, True, torch.bfloat16).save_pretrained(tmp_path / "in")
    done = export(tmp_path / "in", tmp_path / "out", dtype="bf16", max_shard_bytes=20_000)
    before = load_file(tmp_path / "in" / "model.safetensors")
    after = {name: tensor for file in done.directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before)


def test_a_directory_without_a_tokenizer_says_so(tmp_path, exported):
    base = tmp_path / "base"
    shutil.copytree(exported.directory, base, ignore=shutil.ignore_patterns("*token*"))
    card = (export(base, tmp_path / "again").directory / "README.md").read_text()
    assert "there is no tokenizer here" in card


def test_an_export_does_not_overwrite_what_it_was_pointed_at(run, tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="an export does not overwrite"):
        export(run, tmp_path / "mine")
    with pytest.raises(UserError, match="weights are written as fp32, bf16, fp16"):
        export(run, dtype="int4")


def test_a_checkpoint_directory_is_not_written_into(run):
    newest = run / "checkpoints" / "step-00000010"
    with pytest.raises(UserError, match="is no run directory, and no target is given"):
        export(newest)
    assert not (newest / "export").exists()


def test_the_old_export_is_whole_until_the_new_one_is_in_its_place(tmp_path, monkeypatch):
    from windlass.commands.models import export as page

    old, draft, target = ("old", tmp_path / ".export.draft", tmp_path / "export")
    for directory, text in ((target, old), (draft, "new")):
        directory.mkdir()
        (directory / "file").write_text(text)
    rename = page.Path.rename

    def killed(path, to):
        if path == draft:
            raise KeyboardInterrupt
        return rename(path, to)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(page.Path, "rename", killed)
        page.replace(target, draft)
    assert sorted(path.read_text() for path in tmp_path.glob(".*/file")) == ["new", "old"], "neither is lost"
    page.replace(target, draft)
    page.replace(target, shutil.copytree(target, draft))
    assert [path.name for path in tmp_path.iterdir()] == ["export"] and (target / "file").read_text() == "new"


OURS = {"chat_template.jinja": TEMPLATE, "notes.txt": "a note", "gguf/q4.gguf": "weights", "model-q4.safetensors": "q4"}
STALE = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_config.json")


def test_a_new_export_in_the_default_place_takes_away_its_own_files_and_no_others(run, tmp_path, capsys, monkeypatch):
    """init asks for a chat template in it. A shard, or an adapter, of the export before would be read with the new weights."""
    copied = shutil.copytree(run, tmp_path / "run")
    first = export(copied)
    assert first.kept == ()
    written = {path.name for path in first.directory.iterdir()}
    for name, text in {**OURS, **dict.fromkeys(STALE, "{}"), "README.md": "mine"}.items():
        (first.directory / name).parent.mkdir(exist_ok=True)
        (first.directory / name).write_text(text)
    (first.directory / "link").symlink_to("nowhere")
    code, done = run_command(["export", str(copied)], monkeypatch, capsys)
    assert code == 0, done.err
    kept = ["chat_template.jinja", "gguf", "link", "model-q4.safetensors", "notes.txt"]
    assert done.out.splitlines()[-1] == f"kept: {', '.join(kept)}, which no export wrote"
    assert {path.name for path in first.directory.iterdir()} == {*written, *kept}
    assert {name: (first.directory / name).read_text() for name in OURS} == OURS
    assert (first.directory / "README.md").read_text() != "mine" and (first.directory / "link").is_symlink()
    assert sorted(path.name for path in copied.glob(".export*")) == []


def test_every_file_of_an_export_has_a_name_that_the_next_one_takes_away(exported, tmp_path):
    done = export(exported.directory, tmp_path / "shards", max_shard_bytes=10_000)
    for directory in (exported.directory, done.directory):
        assert keep(directory, tmp_path / "empty") == []


@pytest.mark.parametrize("has_links", [True, False])
def test_kept_files_outlive_a_kill_between_the_two_renames(tmp_path, monkeypatch, has_links):
    target, draft, old = (tmp_path / name for name in ("export", ".export.draft", ".export.old"))
    for directory in (draft, old):
        directory.mkdir()
    (old / "notes.txt").write_text("a note")
    (old / "config.json").write_text("{}")

    def no_link(*_args, **_more):
        raise PermissionError

    if not has_links:
        monkeypatch.setattr("os.link", no_link)
    (draft / "chat_template.jinja").write_text("the run's")
    (old / "chat_template.jinja").write_text("mine")
    assert keep(target, draft) == ["notes.txt"]
    replace(target, draft)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert {path.name: path.read_text() for path in target.iterdir()} == {
        "notes.txt": "a note",
        "chat_template.jinja": "the run's",
    }, "what an export writes is its own"


@pytest.mark.parametrize("positions", [8, 16, 17])
def test_a_short_context_is_compared_on_what_it_has(ranks, tmp_path, positions, caplog, monkeypatch):
    from transformers.utils.logging import get_logger as transformers_logger

    from tests import tiny

    config = tiny.recipe(
        tmp_path,
        run={"steps": 1},
        optim={"warmup_steps": 0},
        model={"max_position_embeddings": positions},
        data={"sequence_length": 8},
    )
    ranks.run(1, tiny.train, config)
    monkeypatch.setattr(transformers_logger("transformers"), "propagate", True)  # to where caplog hears it
    assert export(config.run.directory).largest_difference <= 1e-5
    assert "sequence length" not in caplog.text


def test_a_model_that_computes_nan_is_not_exported(run, tmp_path, monkeypatch):
    from windlass.commands.models import export as page

    saved = open_saved(run)
    with torch.no_grad():
        saved.model.model.norm.weight[0] = torch.nan
    monkeypatch.setattr(page, "open_saved", lambda path, step, base: saved)
    with pytest.raises(UserError, match="computes NaN or infinity"):
        export(run, tmp_path / "bad")
    assert not list(tmp_path.iterdir())


def test_a_model_that_transformers_reads_differently_is_not_exported(run, tmp_path, monkeypatch):
    from windlass.commands.models import export as page

    saved, other = open_saved(run), open_saved(run, step=0)
    monkeypatch.setattr(page, "open_saved", lambda path, step, base: saved)
    write = page.save_weights
    named = other.model.named_parameters
    monkeypatch.setattr(page, "save_weights", lambda draft, arch, parameters, *rest: write(draft, arch, named(), *rest))
    with pytest.raises(UserError, match="transformers computes another model"):
        export(run, tmp_path / "bad")
    assert not list(tmp_path.iterdir())


def test_a_difference_of_one_in_ten_thousand_is_not_exported(run, tmp_path, monkeypatch):
    from windlass.commands.models import export as page

    write = page.save_weights

    def with_a_larger_norm(draft, arch, parameters, *rest):
        grown = [(name, tensor * (1 + 1e-4) if name == "model.norm.weight" else tensor) for name, tensor in parameters]
        return write(draft, arch, grown, *rest)

    monkeypatch.setattr(page, "save_weights", with_a_larger_norm)  # every logit is larger by 1e-4 of itself
    with pytest.raises(UserError, match=r"transformers computes another model .*logits differ by \d\.\de-0[45]"):
        export(run, tmp_path / "bad")
    assert not list(tmp_path.iterdir())


def test_experts_of_a_width_that_is_no_multiple_of_four_are_exported(tmp_path):
    source = write_model(tmp_path / "moe", "qwen3_moe", tied=False, moe_intermediate_size=27, hidden_size=42)
    done = export(source, tmp_path / "export")
    assert done.largest_difference <= 1e-5
    ours, theirs = (open_weights(path) for path in (source, done.directory))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3_moe", {"moe_intermediate_size": 6}),
        ("qwen3_moe", {"moe_intermediate_size": 12}),  # rows of 16 bytes in fp32, and not in bf16
        ("qwen3_moe", {"hidden_size": 36}),
        ("mixtral", {"intermediate_size": 14}),
    ],
)
def test_exported_experts_of_odd_widths_compute_as_transformers_loads_them_by_itself(tmp_path, family, fields, dtype):
    from transformers import AutoModelForCausalLM

    done = export(write_model(tmp_path / "moe", family, tied=False, **fields), tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(done.directory, dtype=dtype)
    assert model(input_ids=torch.arange(8)[None]).logits.isfinite().all()


def open_weights(directory):
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")
