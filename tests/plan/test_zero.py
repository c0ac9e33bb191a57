"""Which stage of ZeRO is taken, by the bytes that each needs."""

import pytest

from windlass.plan.zero import choose_stage

NEEDED = {0: 160, 1: 90, 2: 60, 3: 40}


@pytest.mark.parametrize(
    ("limit_bytes", "stage"), [(1000, 0), (160, 0), (159, 1), (90, 1), (89, 2), (60, 2), (59, 3), (40, 3), (1, 3)]
)
def test_the_least_that_fits_is_cut_and_where_nothing_does_what_needs_the_fewest_bytes(limit_bytes, stage):
    assert choose_stage(NEEDED, limit_bytes) == stage


def test_stages_that_may_not_be_are_passed_over():
    assert choose_stage({1: 90, 3: 40}, 200) == 1 and choose_stage({0: 160, 1: 90}, 10) == 1
    assert choose_stage({2: 60, 3: 40}, 60) == 2, "the least that is cut, not the fewest bytes"
    assert choose_stage({2: 40, 3: 60}, 10) == 2, "a model whose root unit is most of it"
