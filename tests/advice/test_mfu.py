"""What a share of the peak means: tokens per second and hours, by hand."""

import pytest

from windlass.advice.mfu import LEVELS, LIMIT, levels


def test_each_level_is_tokens_and_hours_of_one_device():
    found = levels(22.07e9, 989.4e12)
    assert (
        [round(100 * level.mfu) for level in found] == [20, 30, 40, 50] == [round(100 * share) for share, _ in LEVELS]
    )
    assert found[3].tokens_per_s == pytest.approx(0.5 * 989.4e12 / 22.07e9)
    assert found[3].hours == pytest.approx(1e9 / 22415 / 3600, rel=1e-4)
    assert "something is in the way" in found[0].meaning and max(share for share, _ in LEVELS) < LIMIT
