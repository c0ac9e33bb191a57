"""Validation of a checkpoint, on any number of ranks."""

import pytest

from windlass.errors import UserError


def evaluate(path, **options):
    from windlass.commands.evaluate import evaluate as score

    return score(path, **options)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_evaluation_of_a_checkpoint_repeats_the_loss_of_training_on_any_world(run, ranks, world):
    from windlass.report.events import read_events

    lines = ranks.run(world, evaluate, run)
    logged = [line for line in read_events(run / "events.jsonl") if line["kind"] == "validation"][-1]
    assert lines[1:] == [[]] * (world - 1), "rank 0 alone speaks"
    assert f"step {logged['step']}, loss {logged['loss']:.4f}" in lines[0][0].line
    assert f"{logged['bits_per_byte']:.3f} bits per byte" in lines[0][0].line


def test_a_number_of_sequences_below_one_is_refused(run):
    with pytest.raises(UserError, match="--sequences 0"):
        evaluate(run, sequences=0)
