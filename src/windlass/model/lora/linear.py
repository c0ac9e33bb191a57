"""The linear layer of every block: a matrix that may carry low-rank factors, and may be stored in four bits.

    y = W x + b + s B (A drop(x))    A [r, in], B [out, r], s = alpha / r

With factors W is frozen and A and B alone are trained: r (in + out) numbers in place of in x out, with as few gradients and
moments. B begins at 0, so that training begins with the model as it is. Without factors it is torch's own layer.

In training `drop` zeroes elements of what A reads, by masks of dropout.py. Each matrix has masks of its own, but matrices that
are one tensor in the family's files (GPT-2's query, key and value) share theirs, as they share PEFT's module. For backward each
matrix with factors then keeps its dropped input.

Source: Hu et al., LoRA, arXiv 2106.09685.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.model.architecture import Architecture
from windlass.model.dropout import FACTORS, dropout
from windlass.model.lora import nf4
from windlass.model.lora.adapter import BLOCK, A, Adapter, B
from windlass.model.names import stored_tensor


class Factor(nn.Module):
    """One of the two; a module, so that its weight has PEFT's name."""

    def __init__(self, rows: int, columns: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))


Factors = tuple[Tensor, Tensor] | None
"""A and B."""
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x, W, b -> W x + b."""


def multiply(
    x: Tensor,
    dropped: Tensor,
    matrix: Tensor | tuple[Tensor, Tensor],
    bias: Tensor | None,
    factors: Factors,
    s: float,
    product: Product = functional.linear,
) -> Tensor:
    """W x + b + s B (A dropped). `matrix`: W, or the codes and scales of NF4; `product`: of a W."""
    if isinstance(matrix, Tensor):
        out = product(x, matrix, bias)
    else:
        out = nf4.product(x, *matrix)
        out = out if bias is None else out + bias
    if factors is None:
        return out
    a, b = factors
    return out + s * functional.linear(functional.linear(dropped, a), b)


class Linear(nn.Linear):
    """[..., in] -> [..., out]."""

    def __init__(self, inputs: int, outputs: int, bias: bool):
        super().__init__(inputs, outputs, bias=bias)
        self.register_parameter("codes", None)
        self.register_parameter("scales", None)
        self.lora_A: Factor | None = None
        self.lora_B: Factor | None = None
        self.scale, self.dropout, self.site = 1.0, 0.0, 0
        self.product: Product = functional.linear
        """precision/fp8.py has another."""

    def forward(self, x: Tensor, keys_B: Tensor | None = None, positions_T: Tensor | None = None) -> Tensor:
        """`keys_B`: of this layer, for dropout; `positions_T`: those of x in the row, where they do not count from 0."""
        matrix = self.weight if self.codes is None else (self.codes, self.scales)
        a, b = self.lora_A, self.lora_B
        factors = None if a is None or b is None else (a.weight, b.weight)
        dropped = dropout(x, self.dropout, keys_B, self.site, positions_T)
        return multiply(x, dropped, matrix, self.bias, factors, self.scale, self.product)

    def add_factors(self, rank: int, scale: float, probability: float = 0.0, site: int = 0) -> None:
        """On meta: factors without values. `probability`: of dropout; `site`: of its masks in a layer."""
        self.lora_A, self.lora_B = Factor(rank, self.in_features), Factor(self.out_features, rank)
        self.scale, self.dropout, self.site = scale, probability, site

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
    """Adds s B A to the matrices of `model`, whose own factors go: the sum in fp32, or wider where they are. `factors`: by
    name."""
    for target in adapter.targets:
        module = model.get_submodule(target)
        assert isinstance(module, Linear)
        weight = module.weight
        a, b = (factors[f"{target}.{factor}"].to(weight) for factor in (A, B))
        weight.add_(b @ a, alpha=adapter.scale)
        module.lora_A = module.lora_B = None


def adapt(model: nn.Module, arch: Architecture, adapter: Adapter | None) -> None:
    """Gives the linear layers of `model`, on meta and whole, what `adapter` asks for."""
    if adapter is None:
        return
    sites: dict[str, int] = {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, Linear):
            continue
        site = sites.setdefault(stored_tensor(f"{name}.weight", arch).name, FACTORS[name.rpartition(".")[2]])
        if name in adapter.quantized:
            module.store_in_nf4()
        if name in adapter.targets:
            module.add_factors(adapter.rank, adapter.scale, adapter.dropout, site)
