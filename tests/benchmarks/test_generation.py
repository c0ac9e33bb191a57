"""benchmarks/generation.py: both contenders write the same ids, and a contender that writes others is no result."""

import json

import pytest

from tests.docs.test_techniques import DOCS, ROOT, beside

script = beside(ROOT / "benchmarks", "generation")

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def test_a_row_has_the_rates_of_both_and_their_ratio():
    row = script.measure(2, 3, 8, SHAPE)
    assert set(row["tokens_per_s"]) == {"windlass", "transformers"} and row["windlass_over_transformers"] > 0


def test_other_ids_are_no_result(monkeypatch):
    writers = script.writers

    def with_another(directory, tokens):
        return {**writers(directory, tokens), "transformers": lambda prompts: [[0] * tokens for _ in prompts]}

    monkeypatch.setattr(script, "writers", with_another)
    with pytest.raises(RuntimeError, match="different ids"):
        script.measure(1, 1, 8, SHAPE)


def test_the_page_gives_the_rates_that_were_measured():
    page, rows = (
        " ".join((DOCS / "performance.md").read_text("utf-8").split()),
        json.loads(script.RESULTS.read_text())["rows"],
    )
    for name in ("1 at once", "8 at once"):
        rates, ratio = rows[name]["tokens_per_s"], rows[name]["windlass_over_transformers"]
        assert f"{rates['windlass']} and {rates['transformers']}" in page and f"({ratio:.2f}" in page
