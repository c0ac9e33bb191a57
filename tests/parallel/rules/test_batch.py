"""A global batch that ranks cannot divide is refused with sizes that they can."""

import re

import pytest

from windlass.parallel.rules.batch import batch_errors, sequence_errors


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


@pytest.mark.parametrize(
    ("micro", "ranks", "schedule", "pp", "per_sample"),
    [(4, 4, "1f1b", 1, 1), (3, 2, "1f1b", 4, 1), (2, 3, "interleaved-1f1b", 4, 1), (6, 2, "interleaved-1f1b", 2, 2)],
)
def test_every_number_that_a_refusal_names_is_accepted(micro, ranks, schedule, pp, per_sample):
    length, seen = 8, 0
    for sequences in range(1, 120):
        errors = list(batch_errors(sequences * length, length, micro, ranks, schedule, pp, False, per_sample))
        for named in re.findall(r"(tokens_per_step|micro_batch)=([\d or]+)", "".join(error.change for error in errors)):
            for number in map(int, named[1].split(" or ")):
                given = {"tokens_per_step": sequences * length, "micro_batch": micro, named[0]: number}
                assert given["micro_batch"] % per_sample == 0
                again = batch_errors(**given, length=length, batch_ranks=ranks, schedule=schedule, pp=pp)
                assert not list(again), (sequences, named)
                seen += 1
    assert seen > 100


def test_a_step_that_is_no_whole_sequence_is_refused_with_sizes_that_micro_batch_ranks_and_schedule_take():
    assert not list(sequence_errors(64, 16, 3, "1f1b", 4)), "how sequences are divided is asked elsewhere"
    (error,) = sequence_errors(3000, 256, 8, "1f1b", 1)
    assert error.rule == "a global batch is whole sequences, and 3000 = 11 x 256 + 184"
    whole = "the nearest that are whole micro-batches of 8 sequences, too: run.tokens_per_step="
    assert error.change == f"{whole}2048 or 4096"
    (error,) = sequence_errors(3000, 256, 8, "interleaved-1f1b", 4)
    assert error.change == f"{whole}8192"
    (error,) = sequence_errors(3000, 256, 1, "1f1b", 1)
    assert error.change == "the nearest that divide: run.tokens_per_step=2816 or 3072"
    assert not list(batch_errors(8192, 256, 4, 2, "interleaved-1f1b", 4))
