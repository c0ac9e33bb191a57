"""The sequences of a new recipe hold the rows at hand, or it says how many they do not."""

import json

import pytest

from windlass.commands.recipes import row_lengths
from windlass.commands.recipes.first_rows import shape_of_file
from windlass.commands.recipes.new_recipe import init
from windlass.config import load_recipe
from windlass.data.tokenize.tokenizer import save_trained, train_tokenizer


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_talks(file, words):
    """A conversation for each number, whose question has that many words."""
    rows = [
        {"messages": [{"role": "user", "content": "rope " * count}, {"role": "assistant", "content": "yes"}]}
        for count in words
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\nno row\n")


@pytest.mark.parametrize(
    ("words", "length", "too_long", "said"),
    [
        ([10] * 3, 128, "drop", "holds all of 3 rows"),
        ([200] * 3, 256, "drop", "holds all of 3 rows"),
        ([1500] * 2, 2048, "drop", "holds all of 2 rows"),
        ([10] * 100 + [4000], 1024, "cut-prompt", "about 1 of 101 rows are longer"),
        ([10] * 10 + [4000], 3000, "cut-prompt", "about 1 of 11 rows are longer"),
    ],
)
def test_sequences_hold_the_conversations_at_hand(tmp_path, words, length, too_long, said):
    save_trained(train_tokenizer(["rope yes content role user assistant messages rope"] * 9, 300), tmp_path / "model")
    (tmp_path / "model/config.json").write_text(json.dumps({"max_position_embeddings": 3000}))
    write_talks(tmp_path / "rows.jsonl", words)
    (logged,), (lack, bad) = init(tmp_path / "r.yaml", "rows.jsonl", "model", 5, None, None)
    data = load_recipe(tmp_path / "r.yaml").data
    assert (data.sequence_length, data.sources[0].too_long) == (length, too_long)
    assert logged.startswith(f"data.sequence_length={length}: {said}") and said in (tmp_path / "r.yaml").read_text()
    assert lack.startswith("the tokenizer in model has no chat template") and "chat_template.jinja" in lack
    (tmp_path / "model/chat_template.jinja").write_text("{{ messages }}")
    assert init(tmp_path / "other.yaml", "rows.jsonl", "model", 5, None, None) == ([logged], [bad])
    assert bad.startswith(f"of the first {len(words) + 1} rows 1 row is bad: ") and "not JSON" in bad


def test_rows_behind_the_first_ones_are_not_claimed_and_a_deep_line_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(row_lengths, "MANY", 2)
    write_talks(tmp_path / "rows.jsonl", [10, 10, 4000])
    (logged,), _ = init(tmp_path / "r.yaml", "rows.jsonl", "some/model", 5, None, None)
    assert logged.startswith("data.sequence_length=1024: holds all of the first 2 rows")
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join([lines[0], "[" * 200_000, *lines[1:]]))
    (logged,), _ = init(tmp_path / "other.yaml", "rows.jsonl", "some/model", 5, None, None)
    assert logged.startswith("data.sequence_length=1024: holds all of the first 2 rows")


def test_pairs_are_measured_by_characters_where_no_tokenizer_is_here(tmp_path):
    rows = [{"prompt": "a" * 6000, "chosen": "b" * chosen, "rejected": "c"} for chosen in (10, 40_000)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (logged,), _ = init(tmp_path / "r.yaml", "rows.jsonl", "some/model", 5, None, None)
    assert logged.endswith(
        "1 of 2 rows are longer, by 4 characters a token; the longest has 11509 tokens; they are left out"
    )
    config = load_recipe(tmp_path / "r.yaml")
    assert (config.data.sequence_length, config.run.tokens_per_step, config.run.micro_batch) == (8192, 16_384, 2)


def test_a_run_reads_few_rows_a_few_times_and_takes_an_eighth_of_them_a_step_at_most(tmp_path):
    """A hundred short rows were 5,333 epochs: 1,000 steps of 16 sequences of 1,024."""
    save_trained(train_tokenizer(["rope yes content role user assistant messages rope"] * 9, 300), tmp_path / "model")
    write_talks(tmp_path / "rows.jsonl", [10] * 100)
    init(tmp_path / "r.yaml", "rows.jsonl", "model", None, None, None)
    config = load_recipe(tmp_path / "r.yaml")
    per_epoch = row_lengths.choose_length(
        tmp_path / "rows.jsonl", shape_of_file(tmp_path / "rows.jsonl", None), "model"
    ).sequences
    a_step = config.run.tokens_per_step // config.data.sequence_length
    assert (config.run.epochs, config.run.steps, config.data.sequence_length) == (3, None, 128)
    assert 8 <= per_epoch / a_step < 16 and config.evaluate.every_steps == -(-3 * per_epoch // a_step // 5)


def test_of_pairs_two_sequences_are_one_row(tmp_path):
    rows = [{"prompt": "a" * 9, "chosen": "b", "rejected": "c"}] * 40
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    init(tmp_path / "r.yaml", "rows.jsonl", "some/model", None, None, None)
    config = load_recipe(tmp_path / "r.yaml")
    assert (config.run.epochs, config.run.tokens_per_step, config.run.micro_batch) == (1, 8 * 128, 2)
