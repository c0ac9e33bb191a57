"""The linear layer of every block: a matrix that may carry low-rank factors, and may be stored in four bits.

    y = W x + b + s B (A x)          A [r, in], B [out, r], s = alpha / r

With factors W is frozen and A and B alone are trained: r (in + out) numbers in place of in x out, with as few gradients and
moments. B begins at 0, so that training begins with the model as it is. Without factors it is torch's own layer.

Source: Hu et al., LoRA, arXiv 2106.09685.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.model.lora import nf4
from windlass.model.lora.adapter import BLOCK, A, Adapter, B


class Factor(nn.Module):
    """One of the two; a module, so that its weight has PEFT's name."""

    def __init__(self, rows: int, columns: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))


Factors = tuple[Tensor, Tensor] | None
"""A and B."""


def multiply(
    x: Tensor, matrix: Tensor | tuple[Tensor, Tensor], bias: Tensor | None, factors: Factors, s: float
) -> Tensor:
    """W x + b + s B (A x). `matrix`: W, or the codes and scales of NF4."""
    if isinstance(matrix, Tensor):
        out = functional.linear(x, matrix, bias)
    else:
        out = nf4.product(x, *matrix)
        out = out if bias is None else out + bias
    if factors is None:
        return out
    a, b = factors
    return out + s * functional.linear(functional.linear(x, a), b)


class Linear(nn.Linear):
    """[..., in] -> [..., out]."""

    def __init__(self, inputs: int, outputs: int, bias: bool):
        super().__init__(inputs, outputs, bias=bias)
        self.register_parameter("codes", None)
        self.register_parameter("scales", None)
        self.lora_A: Factor | None = None
        self.lora_B: Factor | None = None
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.weight if self.codes is None else (self.codes, self.scales)
        a, b = self.lora_A, self.lora_B
        factors = None if a is None or b is None else (a.weight, b.weight)
        return multiply(x, matrix, self.bias, factors, self.scale)

    def add_factors(self, rank: int, scale: float) -> None:
        """On meta: factors without values."""
        self.lora_A, self.lora_B = Factor(rank, self.in_features), Factor(self.out_features, rank)
        self.scale = scale

    def store_in_nf4(self) -> None:
        """On meta: codes and scales without values, in place of the matrix."""
        rows, columns = self.out_features, self.in_features
        self.register_parameter("weight", None)
        codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
        scales = torch.empty(rows, columns // BLOCK, dtype=torch.bfloat16)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)


@torch.no_grad()
def merge(model: nn.Module, factors: Mapping[str, Tensor], adapter: Adapter) -> None:
    """Adds s B A to the matrices of `model`, which has no factors of its own: the sum in fp32, or wider where they are.
    `factors`: by name."""
    for target in adapter.targets:
        weight = model.get_submodule(target).get_parameter("weight")
        a, b = (factors[f"{target}.{factor}"].to(weight) for factor in (A, B))
        weight.add_(b @ a, alpha=adapter.scale)


def adapt(model: nn.Module, adapter: Adapter | None) -> None:
    """Gives the linear layers of `model`, on meta and whole, what `adapter` asks for."""
    if adapter is None:
        return
    for name, module in list(model.named_modules()):
        if not isinstance(module, Linear):
            continue
        if name in adapter.quantized:
            module.store_in_nf4()
        if name in adapter.targets:
            module.add_factors(adapter.rank, adapter.scale)
