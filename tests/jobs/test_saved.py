"""What is read back from disk: evaluate, generate and export of a run, of one checkpoint, and of a copied directory."""

import json
import shutil

import pytest
import torch

from tests.jobs import tiny
from windlass.data.tokenizer import open_tokenizer
from windlass.errors import BadCheckpoint, UserError
from windlass.jobs import checkpoints
from windlass.jobs.export import export
from windlass.jobs.generate import choose, generate
from windlass.jobs.saved import find_checkpoint, open_saved


@pytest.fixture(scope="module")
def run(tmp_path_factory, ranks):
    base = tmp_path_factory.mktemp("saved")
    config = tiny.recipe(base, "run", checkpoint={"keep_steps": [0]})
    ranks.run(2, tiny.train, config)
    return config.run.directory


@pytest.fixture(scope="module")
def exported(run):
    return export(run)


def evaluate(path, **options):
    from windlass.jobs.evaluate import evaluate as score

    return score(path, **options)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_evaluation_of_a_checkpoint_repeats_the_loss_of_training_on_any_world(run, ranks, world):
    from windlass.report.events import read_events

    lines = ranks.run(world, evaluate, run)
    logged = [line for line in read_events(run / "events.jsonl") if line["kind"] == "validation"][-1]
    assert lines[1:] == [[]] * (world - 1), "rank 0 alone speaks"
    assert f"step {logged['step']}, loss {logged['loss']:.4f}" in lines[0][0]
    assert f"{logged['bits_per_byte']:.3f} bits per byte" in lines[0][0]


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


def test_text_is_the_same_from_the_run_the_checkpoint_a_copy_and_the_export(run, exported, tmp_path):
    newest = find_checkpoint(run, None)
    copied = shutil.copytree(newest, tmp_path / "elsewhere")
    texts = {
        generate(path, ["the deck"], max_tokens=12, seed=5)[0] for path in (run, newest, copied, exported.directory)
    }
    assert len(texts) == 1


def test_a_seed_draws_the_same_text_and_steps_differ(run):
    first = generate(run, ["a rope"], max_tokens=24, temperature=1.0, seed=1)
    assert first == generate(run, ["a rope"], max_tokens=24, temperature=1.0, seed=1)
    assert first != generate(run, ["a rope"], max_tokens=24, temperature=1.0, seed=2)
    assert first != generate(run, ["a rope"], step=0, max_tokens=24, temperature=1.0, seed=1)


def test_recorded_samples_reach_the_events(run):
    generate(run, ["pull"], max_tokens=3, record=True)
    line = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    assert (line["kind"], line["step"], line["prompt"]) == ("sample", tiny.STEPS, "pull")


def test_sampling_takes_the_likeliest_at_temperature_zero_and_stays_in_the_nucleus():
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.1, 3.0, 2.0, -1.0]).log_softmax(-1)
    assert choose(logits, 0, 1.0, generator) == 1
    drawn = [choose(logits, 1.0, 1.0, generator) for _ in range(400)]
    assert set(drawn) == {0, 1, 2, 3}
    assert 0.55 < drawn.count(1) / 400 < 0.8, "probability 0.68"
    assert {choose(logits, 1.0, 0.7, generator) for _ in range(200)} == {1, 2}
    assert {choose(logits, 1.0, 0.5, generator) for _ in range(50)} == {1}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 0}, "--max-tokens 0"),
        ({"temperature": -1.0}, "--temperature -1.0"),
        ({"top_p": 0.0}, "--top-p 0.0"),
        ({"step": 5}, "choose one of: 0, 3, 6, 9, 10"),
    ],
)
def test_bad_generation_options_are_refused(run, options, said):
    with pytest.raises(UserError, match=said):
        generate(run, ["a"], **options)


def test_a_prompt_longer_than_the_model_is_refused(run):
    with pytest.raises(UserError, match="for a model of 64 positions"):
        generate(run, ["the ship " * 60])


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


def test_a_damaged_checkpoint_is_refused_by_name(run, tmp_path):
    copied = shutil.copytree(find_checkpoint(run, None), tmp_path / "bad")
    weights = bytearray((copied / "rank-00001.bin").read_bytes())
    for place in range(100, len(weights), 997):  # weights and states: only what is asked for is read, and verified
        weights[place] ^= 1
    (copied / "rank-00001.bin").write_bytes(weights)
    with pytest.raises(BadCheckpoint, match="rank-00001.bin"):
        list(checkpoints.check(copied))
    with pytest.raises(BadCheckpoint, match="rank-00001.bin"):
        open_saved(copied)


def test_checkpoint_commands_print_what_there_is(run, tmp_path):
    lines = list(checkpoints.table(run, verified=True))
    assert [line.split()[0] for line in lines[1:]] == [f"step-{step:08d}" for step in (0, 3, 6, 9, 10)]
    assert all(line.endswith("whole") for line in lines[1:])
    assert len(list(checkpoints.check(run))) == 5
    changed = list(checkpoints.compare(run / "checkpoints" / "step-00000009", run))
    assert changed[-1] == "0 tensors are equal, bit for bit"
    assert "other values: model.model.norm.weight" in changed
    copied = shutil.copytree(run, tmp_path / "run")
    assert checkpoints.delete(copied, keep_last=1, keep_best=1) == "deleted: step 0, step 3, step 6, step 9"
    assert checkpoints.delete(copied, keep_last=1, keep_best=1) == "deleted: nothing"
