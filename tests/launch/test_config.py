"""The recipe's launch block."""

import pytest
from pydantic import ValidationError

from windlass.launch.config import LaunchConfig


def test_bounds():
    assert LaunchConfig().max_restarts == 3 and LaunchConfig(stall_s=0).stall_s == 0
    for wrong in ({"max_restarts": -1}, {"stall_s": -1}, {"restarts": 1}):
        with pytest.raises(ValidationError):
            LaunchConfig(**wrong)
