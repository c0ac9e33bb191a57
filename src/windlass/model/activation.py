"""Activation functions by Hugging Face's names."""

from torch import Tensor
from torch.nn import functional


def activate(x: Tensor, name: str) -> Tensor:
    if name in ("gelu_new", "gelu_pytorch_tanh"):
        return functional.gelu(x, approximate="tanh")
    if name in ("silu", "swish"):
        return functional.silu(x)
    return functional.gelu(x) if name == "gelu" else functional.relu(x)
