"""The figures behind the checks on ids; test_lint.py plants every fault."""

import numpy as np
import pytest

from windlass.data.lint.check_ids import Copies, check_overlap, longest_run
from windlass.data.lint.findings import Findings


@pytest.mark.parametrize(
    ("ids", "expected"), [([5], (1, 5)), ([5, 5, 6, 6, 6, 5], (3, 6)), ([1, 2, 3, 3], (2, 3)), ([4] * 9, (9, 4))]
)
def test_the_longest_run_of_one_id(ids, expected):
    assert longest_run(np.array(ids)) == expected


@pytest.mark.parametrize(
    ("copies", "num_documents", "expected"),
    [([], 10, False), ([64], 10**6, True), ([63], 10, False), ([5, 5], 199, True), ([5, 5], 200, False)],
)
def test_a_few_short_copies_are_no_finding(copies, num_documents, expected):
    found = Copies()
    for length in copies:
        found.add(length, 0, 1)
    assert found.are_many(num_documents) is expected


def test_an_overlap_names_the_longest_document_in_both_sets():
    found = Findings("validation")
    train, other = {1: (10, 80), 2: (11, 500), 3: (12, 9)}, {2: (4, 500), 1: (3, 80), 9: (5, 7)}
    check_overlap(found, train, other, "there {}".format, "here {}".format)
    (finding,) = found.list()
    assert finding.where == "validation: there 4"
    assert finding.what == (
        "2 of 3 documents are training documents; the longest, of 500 tokens, is in here 11 of train"
    )
