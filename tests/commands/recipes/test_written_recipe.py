"""The text of a new recipe."""

from pathlib import Path

import pytest

from windlass.commands.recipes.row_lengths import Chosen
from windlass.commands.recipes.written_recipe import written
from windlass.config import parse_recipe

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("length", "sequences", "kind", "base", "a_step", "micro"),
    [
        (1024, None, "sft", None, 16, 2),
        (8192, None, "sft", None, 2, 1),
        (3000, None, "sft", None, 4, 1),
        (1024, 64, "sft", None, 8, 2),
        (128, 7, "sft", None, 1, 1),
        (128, 7, "dpo", None, 2, 2),
        (1024, 4000, "dpo", None, 16, 2),
        (128, 138, "sft", None, 16, 2),  # of an epoch of 138 sequences
        (128, 138, "sft", 2_000_000_000, 16, 2),
        (128, 138, "sft", 1_000_000, 2, 2),
        (128, 30, "sft", 1_000_000, 1, 1),
        (1024, 4000, "sft", 1_000_000, 16, 2),
    ],
)
def test_a_step_takes_so_many_sequences(length, sequences, kind, base, a_step, micro):
    rows = {"path": "rows.jsonl", "format": "chat" if kind == "sft" else "preference"}
    chosen = Chosen(length, "drop", "", sequences)
    text = written(Path("r.yaml"), rows, "org/model", ("epochs", 3), kind, chosen, ("none", ""), base)
    run = parse_recipe(text, "r.yaml").run
    assert (run.tokens_per_step, run.micro_batch, run.epochs) == (a_step * length, micro, 3)


def test_the_stage_of_zero_is_left_to_windlass():
    """Two processes trained with ZeRO-3, at 0.8 of the tokens a second of one, where README says that windlass chooses."""
    text = written(
        Path("r.yaml"), {"path": "a.txt"}, "small", ("steps", 9), "pretrain", Chosen(256, "drop", ""), ("none", "")
    )
    assert parse_recipe(text, "r.yaml").parallel.zero == "auto"


@pytest.mark.parametrize(
    ("model", "kind", "lines"),
    [("small", "pretrain", 28), *(("org/model", kind, 20) for kind in ("pretrain", "sft", "dpo"))],
)
def test_it_is_as_long_as_the_readme_says(model, kind, lines):
    """It was 28 lines where README said twenty."""
    chosen = Chosen(1024, "drop", "", None)
    text = written(Path("r.yaml"), {"path": "rows.jsonl"}, model, ("epochs", 3), kind, chosen, ("none", ""))
    assert abs(len(text.splitlines()) - lines) <= 2
    sentence = "a recipe of about twenty lines, or thirty for a new model"
    assert all(sentence in (ROOT / page).read_text() for page in ("README.md", "docs/howto/begin-a-recipe.md"))
