"""The `report:` block: its default, and what it refuses."""

import pytest
from pydantic import ValidationError

from windlass.report.config import ReportConfig


def test_default_interval_is_ten_steps():
    assert ReportConfig().every_steps == 10


@pytest.mark.parametrize("bad", [{"every_steps": 0}, {"every_steps": -1}, {"every_step": 10}])
def test_refuses_an_interval_below_one_and_unknown_keys(bad):
    with pytest.raises(ValidationError):
        ReportConfig(**bad)
