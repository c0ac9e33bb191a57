"""Activation functions against transformers' by the same names."""

import pytest
import torch
from transformers.activations import ACT2FN

from windlass.model.layers import activate


@pytest.mark.parametrize("name", ["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
def test_names_are_those_of_transformers(name):
    x = torch.linspace(-3, 3, 41, dtype=torch.float64)
    assert (activate(x, name) - ACT2FN[name](x)).abs().max() <= 1e-12
