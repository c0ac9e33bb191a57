"""An export is what transformers loads, with the same numbers; nothing is overwritten."""

import json

import pytest
import torch

from windlass.data.tokenizer import open_tokenizer
from windlass.errors import UserError
from windlass.jobs.export import export
from windlass.jobs.generate import generate
from windlass.jobs.saved import open_saved


def test_an_export_loads_in_transformers_with_the_same_logits_and_text(run, exported):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert exported.directory == run / "export" and exported.largest_difference <= 1e-5
    theirs = AutoModelForCausalLM.from_pretrained(exported.directory)
    tokenizer = AutoTokenizer.from_pretrained(exported.directory)
    saved = open_saved(run)
    ids = tokenizer("the ship and the anchor", return_tensors="pt").input_ids
    with torch.no_grad():
        assert (theirs(ids).logits - saved.model(ids)).abs().max() <= 1e-5
    text = theirs.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    (ours,) = generate(run, ["the ship and the anchor"], max_tokens=20, temperature=0)
    assert tokenizer.decode(text, skip_special_tokens=True) == ours
    eos = open_tokenizer(exported.directory)[1]
    assert theirs.config.eos_token_id == eos == tokenizer.eos_token_id
    assert theirs.config.vocab_size == 300, "the padding of the vocabulary is trimmed"


def test_bf16_export_is_half_the_size_and_says_how_far_it_is(run, tmp_path):
    half = export(run, tmp_path / "half", dtype="bf16")
    sizes = [(path / "model.safetensors").stat().st_size for path in (half.directory, run / "export")]
    assert 0.4 < sizes[0] / sizes[1] < 0.7
    assert json.loads((half.directory / "config.json").read_text())["dtype"] == "bfloat16"


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


@pytest.mark.parametrize("positions", [8, 16, 17])
def test_a_short_context_is_compared_on_what_it_has(ranks, tmp_path, positions):
    from tests.jobs import tiny

    config = tiny.recipe(
        tmp_path,
        run={"steps": 1},
        optim={"warmup_steps": 0},
        model={"max_position_embeddings": positions},
        data={"sequence_length": 8},
    )
    ranks.run(1, tiny.train, config)
    assert export(config.run.directory).largest_difference <= 1e-5


def test_a_model_that_computes_nan_is_not_exported(run, tmp_path, monkeypatch):
    from windlass.jobs import export as page

    saved = open_saved(run)
    with torch.no_grad():
        saved.model.model.norm.weight[0] = torch.nan
    monkeypatch.setattr(page, "open_saved", lambda path, step: saved)
    with pytest.raises(UserError, match="computes NaN or infinity"):
        export(run, tmp_path / "bad")
    assert not list(tmp_path.iterdir())


def test_a_model_that_transformers_reads_differently_is_not_exported(run, tmp_path, monkeypatch):
    from windlass.jobs import export as page

    saved, other = open_saved(run), open_saved(run, step=0)
    monkeypatch.setattr(page, "open_saved", lambda path, step: saved)
    write = page.save_weights
    named = other.model.named_parameters
    monkeypatch.setattr(page, "save_weights", lambda draft, arch, parameters, *rest: write(draft, arch, named(), *rest))
    with pytest.raises(UserError, match="transformers computes another model"):
        export(run, tmp_path / "bad")
    assert not list(tmp_path.iterdir())
