"""What cannot be sampled by."""

import pytest

from windlass.commands.models.sampling import Sampling
from windlass.errors import UserError


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 0}, "--max-tokens 0"),
        ({"temperature": -1.0}, "--temperature -1.0"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"top_p": 0.0}, "--top-p 0.0"),
    ],
)
def test_bad_sampling_is_refused(options, said):
    with pytest.raises(UserError, match=said):
        Sampling(**options)
