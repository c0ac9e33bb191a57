"""Text from a checkpoint: what a seed fixes, what sampling may draw, what is refused."""

import json
import shutil

import pytest
import torch

from tests import tiny
from windlass.commands import generate as of_generate
from windlass.commands.generate import choose, generate
from windlass.data.tokenize.tokenizer import open_tokenizer
from windlass.errors import UserError
from windlass.model.cache import KVCache


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
        ({"temperature": float("nan")}, "--temperature nan"),
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


def test_the_cache_is_as_long_as_the_text_may_be(run, monkeypatch):
    lengths = []
    monkeypatch.setattr(
        of_generate, "KVCache", lambda *given, **more: lengths.append(given[2]) or KVCache(*given, **more)
    )
    generate(run, ["the ship"], max_tokens=3, seed=1)
    generate(run, ["the ship"], max_tokens=1000, seed=1)
    assert 3 < lengths[0] < 12 and lengths[1] == 64, "the model's positions at most"


def test_samples_are_recorded_in_a_run_and_nowhere_else(run, exported):
    newest = run / "checkpoints" / f"step-{tiny.STEPS:08d}"
    for path in (newest, exported.directory):
        with pytest.raises(UserError, match="samples are written into a run"):
            generate(path, ["a"], record=True)
        assert not (path / "events.jsonl").exists()


def test_a_directory_without_a_tokenizer_is_refused(exported, tmp_path):
    shutil.copytree(exported.directory, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"bare has no tokenizer\.json"):
        generate(tmp_path / "bare", ["a"])


def test_it_stops_where_the_models_own_config_says(exported, tmp_path):
    shutil.copytree(exported.directory, tmp_path / "other")
    tokenizer, eos_id = open_tokenizer(exported.directory)
    (text,) = generate(tmp_path / "other", ["the"], temperature=0.0, max_tokens=6)
    second = tokenizer.encode(text).ids[1]
    file = tmp_path / "other" / "config.json"
    for ends in (second, [eos_id, second]):
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": ends}))
        (stopped,) = generate(tmp_path / "other", ["the"], temperature=0.0, max_tokens=6)
        assert text.startswith(stopped) and len(tokenizer.encode(stopped).ids) < len(tokenizer.encode(text).ids)
