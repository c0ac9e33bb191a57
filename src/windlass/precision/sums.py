"""Gradients that are added to their sums by the product that makes them.

The gradient of a matrix over a micro-batch is a product too: dW = dy^T x. Written in 16 bits, read again and added to the sum in
fp32, it moves 12 bytes per parameter, 10 of them in a pass of its own (masters.py). A product that adds to the sum moves 8, while
it multiplies, and dW is never rounded to 16 bits. The zeros cost 4 more, once per step:

    sum = 0 at the step's first micro-batch;  sum += dy^T x  of each

On one H200 (14,336 x 4,096, 4,096 tokens, bf16; `python benchmarks/gpu/ground_truth.py --only sums`) the product took 0.678 ms
alone and 0.687 with the sum, which alone takes 0.153. torch has such a product on CUDA only (model/head/loss.py asks for it).

The sums keep their memory between steps: 4 bytes per parameter of these matrices. Experts, fp8, the factors of an adapter, norms
and embeddings stay with masters.py's sums; so do all matrices over tp, in a pipeline and beside replicas. A matrix is used, then
differentiated, then used again: else autograd raises, as in a pipeline, where a forward comes before the last backward has added.

Source: the fused weight gradients of Megatron-LM, arXiv 2205.05198.

Legend: N tokens, O outputs, I inputs.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

_ADDED: Final = set[int]()
"""Addresses of sums that something was added to: a compiled backward leaves no other trace of it."""


@torch.library.custom_op("windlass::add_product", mutates_args=("total_OI",))
def add_product(total_OI: Tensor, grad_NO: Tensor, x_NI: Tensor) -> None:
    """total += grad^T x, in total's dtype."""
    _ADDED.add(total_OI.data_ptr())
    add_in_place(total_OI, grad_NO, x_NI)


def add_in_place(total_OI: Tensor, grad_NO: Tensor, x_NI: Tensor) -> None:
    if total_OI.dtype == x_NI.dtype:
        torch.addmm(total_OI, grad_NO.T, x_NI, out=total_OI)
    elif total_OI.is_cuda:
        torch.addmm(total_OI, grad_NO.T, x_NI, out_dtype=total_OI.dtype, out=total_OI)
    else:
        total_OI.addmm_(grad_NO.to(total_OI.dtype).T, x_NI.to(total_OI.dtype))


@add_product.register_fake
def _(total_OI: Tensor, grad_NO: Tensor, x_NI: Tensor) -> None:
    return None


class _Linear(torch.autograd.Function):
    """functional.linear whose weight gets no gradient: `total_OI` is added to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, total_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_OI, total_OI)
        ctx.has_bias = bias_O is not None
        return functional.linear(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, weight_OI, total_OI = ctx.saved_tensors
        grad_NO = grad.flatten(0, -2)
        add_product(total_OI, grad_NO, x.flatten(0, -2))
        grad_x = grad @ weight_OI if ctx.needs_input_grad[0] else None
        return grad_x, None, grad_NO.sum(0) if ctx.has_bias else None, None


class SummedProduct:
    """x, W, b -> x W^T + b, in the place of functional.linear; in backward the gradient of W is added to that of `master`."""

    def __init__(self, master: nn.Parameter, dtype: torch.dtype):
        self._master, self._dtype = master, dtype
        self._total: Tensor | None = None

    def begin(self) -> None:
        """Before a step's first micro-batch: a master without a gradient gets one of zeros."""
        if self._master.grad is None:
            if self._total is None:
                self._total = torch.empty_like(self._master.detach(), dtype=self._dtype)
                _ADDED.discard(self._total.data_ptr())
            self._master.grad = self._total.zero_()
        assert self._master.grad is self._total, "products add to this tensor, and to no other"

    def end(self) -> None:
        """After a step's last micro-batch: where backward never came here, the master has no gradient."""
        if self._total is not None and self._total.data_ptr() not in _ADDED:
            self._master.grad = None

    def __call__(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        if self._total is None or not torch.is_grad_enabled():
            return functional.linear(x, weight_OI, bias_O)
        out: Tensor = _Linear.apply(x, weight_OI, bias_O, self._total)
        return out


def apply_sums(linears: Iterable[tuple[str, Any]], masters: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
    """Lets the named `linears` (model/lora/linear.py) that are trained, and multiply as torch does, add their gradients up in
    their products, in place. `dtype`: of the sums."""
    for name, linear in linears:
        master = masters.get(f"{name}.weight")
        if master is not None and master.requires_grad and linear.product is functional.linear:
            linear.product = SummedProduct(master, dtype)


def summed(linears: Iterable[Any]) -> list[SummedProduct]:
    return [linear.product for linear in linears if isinstance(linear.product, SummedProduct)]
