"""Rows beside other tools. benchmarks/generation.py: both contenders write the same ids, and a contender that writes others is no
result. benchmarks/throughput.py: contenders run in turns, and a row is of their medians."""

import ast
import json

import pytest

from tests.docs.test_techniques import DOCS, ROOT, beside

script = beside(ROOT / "benchmarks", "generation")
throughput = beside(ROOT / "benchmarks", "throughput")

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


@pytest.mark.parametrize("has_litgpt", [True, False])
def test_contenders_run_in_turns_and_a_row_is_of_their_medians(monkeypatch, tmp_path, has_litgpt):
    rates = {"windlass": [90, 120, 100], "trainer": [80, 50, 60], "accelerate": [1, 125, 200], "litgpt": [10, 20, 30]}
    order, python = [], tmp_path / "python"
    if has_litgpt:
        python.touch()

    def rate(name, *_row):
        order.append(name)
        return rates[name][order.count(name) - 1]

    monkeypatch.setattr(throughput, "LITGPT", python)
    monkeypatch.setattr(throughput, "windlass_rate", lambda *_row: rate("windlass"))
    monkeypatch.setattr(throughput, "rival_rate", rate)
    row = throughput.measure("bf16 compiled, 2 ranks", 3, tmp_path)
    there = list(rates) if has_litgpt else list(rates)[:3]
    assert order == there + there[1:] + there[:1] + there[2:] + there[:2], "each begins a round"
    assert row["windlass"] == {"tokens_per_s": 100, "spread": 1.333} and row["over trainer"] == 1.667
    assert row["over accelerate"] == 0.8 and row.get("over litgpt") == (5.0 if has_litgpt else None)


def test_rivals_have_a_function_each_and_load_nothing_of_ours():
    """LitGPT's environment has no windlass."""
    tree = ast.parse(throughput.RIVALS.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in names if name.split(".")[0] in ("windlass", "meters")]
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert functions >= set(throughput.CONTENDERS) - {"windlass", throughput.SPINNING}


def test_threads_that_spin_are_a_contender_where_there_are_several(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(throughput, "LITGPT", tmp_path / "python")
    monkeypatch.setattr(throughput, "windlass_rate", lambda *row: given.append(row[-1]) or 100 - 20 * (row[-1] is None))
    monkeypatch.setattr(throughput, "rival_rate", lambda *_row: 50)
    row = throughput.measure("fp32", 1, tmp_path)
    assert given == [None, throughput.SPINS] and row["over windlass spinning"] == 0.8
    assert throughput.SPINNING not in throughput.measure("fp32, 2 ranks", 1, tmp_path)


def test_every_rows_recipe_is_taken(tmp_path):
    from windlass.config import load_recipe

    for policy, compiled, ranks in throughput.ROWS.values():
        config = load_recipe(str(throughput.recipe(tmp_path, policy, compiled, ranks)), f"run.directory={tmp_path}/run")
        assert config.parallel.zero == "auto" and config.parallel.compile == compiled
        assert config.precision.policy == policy and config.run.tokens_per_step == 1024 * ranks
