"""The scripts of benchmarks/gpu are modules beside each other, as they are when one of them is run."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))


@pytest.fixture(scope="session")
def has_fp8():
    """Whether this CPU multiplies fp8; asked of torch itself, not of what is tested."""
    one = torch.ones((16, 16)).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(one, one.T, torch.ones(()), torch.ones(()), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True
