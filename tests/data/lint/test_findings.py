"""Findings of one set: the first of each code in words, the rest as a number, errors first."""

import pytest

from windlass.data.lint.findings import KINDS, Findings


def test_the_first_of_a_code_is_reported_and_the_others_counted():
    found = Findings("train")
    found.add("duplicate-documents", "a copy", "shard.00000.mds, sample 1")
    found.add("duplicate-documents", "another copy", "shard.00000.mds, sample 2")
    found.add("mask-empty", "nothing", count=1200)
    error, warning = found.list()
    assert "mask-empty" in found and "mask-full" not in found
    assert error.line == "error mask-empty: nothing; 1,199 more of the kind (train)"
    assert warning.line == (
        "warning duplicate-documents: a copy; 1 more of the kind (train: shard.00000.mds, sample 1)"
    )
    assert (warning.times, warning.change) == (2, KINDS["duplicate-documents"].change)


def test_a_code_that_is_not_listed_is_a_bug():
    with pytest.raises(AssertionError):
        Findings("train").add("no-such-code", "")
