"""A global batch that ranks cannot divide is refused with sizes that they can."""

import pytest

from windlass.parallel.rules.batch import batch_errors


@pytest.mark.parametrize("tokens", [240, 320])
def test_the_remedies_divide(tokens):
    assert not list(batch_errors(tokens, 8, 1, 2, "1f1b", 1))
    (error,) = batch_errors(tokens, 8, 4, 4, "1f1b", 1)
    assert error.given == f"run.tokens_per_step={tokens} ({tokens // 8} sequences) on 4 ranks with run.micro_batch=4"
    assert error.rule.endswith("= 16")
    sizes, _, micros = error.change.partition("; or, keeping it, run.micro_batch=")
    for size in sizes.partition("run.tokens_per_step=")[2].split(" or "):
        assert not list(batch_errors(int(size), 8, 4, 4, "1f1b", 1))
    for micro in filter(None, micros.split(" or ")):
        assert not list(batch_errors(tokens, 8, int(micro), 4, "1f1b", 1))


def test_a_schedule_is_asked_about_the_number_of_micro_batches():
    (error,) = batch_errors(8 * 3, 8, 1, 1, "1f1b", 4)
    assert error.given == "3 micro-batches per step with parallel.pp=4 and parallel.schedule=1f1b"
    assert not list(batch_errors(8 * 4, 8, 1, 1, "1f1b", 4))
