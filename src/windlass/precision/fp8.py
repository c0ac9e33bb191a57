"""fp8: the products of the blocks' matrices in eight bits, everything else as policy bf16 has it.

Each of the three products of a matrix, y = x W^T, dx = dy W, dW = dy^T x, casts both of its factors to eight bits with a scale
that is computed from the numbers at hand (dynamic scaling), and sums in fp32:

    scaling      forward  backward   one scale for               cost and use
    tensorwise   e4m3     e5m2 (dy)  a whole tensor              the fastest; one outlier takes digits from all numbers
    rowwise      e4m3     e4m3       each slice that is summed   more passes over the numbers; every scale is a power of 2

Weights stay in fp32 with a copy in bf16, or tensorwise in eight bits (fp8_weights.py), and activations are kept for backward in
bf16: fp8 saves time on GPUs that have it (NVIDIA since Ada and Hopper, twice the rate of bf16), and little memory. Embedding,
head, norms, attention and experts stay in bf16, and so does a matrix whose sides are no multiples of 16, which such products ask
for. dW sums over tokens: where their number is no multiple of 16, zeros are added.

Elsewhere torchao emulates the products: the casts and scales are the same, and the sums run in the wider dtype. On a CPU that is
slower than bf16, and proves what does not need the hardware.

The scale of a tensor is that of the micro-batch on one rank: another micro-batch, or another order of sums, is another rounding.
Layouts that cut a row or a matrix over ranks (tp, context) would scale each part by itself, and are refused.

Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433; torchao.float8.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from windlass.errors import UserError
from windlass.hardware import Accelerator
from windlass.output import silent_imports
from windlass.precision.config import FP8_MULTIPLE, Scaling, block_matrices, is_fit


def float8_library() -> Any:
    """torchao.float8. Raises UserError where it is missing."""
    try:
        with silent_imports():  # a line for each kernel of its wheel that is for another GPU
            import torchao.float8.float8_linear
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("torchao")
        raise UserError(
            "precision.policy=fp8, and torchao "
            + ("is not installed" if is_missing else f"cannot be imported: {error}"),
            "torchao computes the products in fp8",
            "pip install 'windlass-lm[fp8]', or use precision.policy=bf16",
        ) from None
    return torchao.float8


def check_devices(devices: Sequence[Accelerator]) -> list[str]:
    """Sentences for the user. Raises UserError where a GPU has no units for fp8, or torchao is missing."""
    float8_library()
    if slow := sorted({one.name for one in devices if one.lacks_fp8}):
        raise UserError(
            f"precision.policy=fp8 on {', '.join(slow)}",
            "matrix units have fp8 from compute capability 8.9 on (Ada, Hopper, Blackwell)",
            "use precision.policy=bf16; a resumed run also needs 'run.accept_drift=[precision.policy]'",
        )
    if any(one.capability is None for one in devices):
        return ["precision.policy=fp8 is emulated on a CPU: the same casts and scales, slower than bf16"]
    return []


class Product:
    """x, W, bias -> x W^T + bias in fp8, in the place of functional.linear. `casts_ahead`: whether weights may come in eight bits
    (fp8_weights.py), and `is_compiled`: made by a compiled kernel."""

    def __init__(self, scaling: Scaling, emulate: bool, casts_ahead: bool = False, is_compiled: bool = False):
        float8 = float8_library()
        config = float8.Float8LinearConfig.from_recipe_name(scaling)
        self._config = dataclasses.replace(config, emulate=emulate)
        gemms = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
        linear, self._tensors = float8.float8_linear, float8.float8_training_tensor
        self.casts_ahead, self.is_compiled = casts_ahead, is_compiled
        self.of_weights: torch.dtype = config.cast_config_weight.target_dtype
        aligned, padded = (
            [linear.ScaledMMConfig(emulate, gemm.use_fast_accum, False, pad_inner_dim) for gemm in gemms]
            for pad_inner_dim in (False, True)
        )
        self._aligned = linear.LinearMMConfig(*aligned)
        self._padded = linear.LinearMMConfig(*aligned[:2], padded[2])
        self._product = linear.matmul_with_hp_or_float8_args

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        gemms = self._padded if x.numel() // x.shape[-1] % FP8_MULTIPLE else self._aligned
        out: Tensor = self._product.apply(x, weight.t(), gemms, self._config)
        return out if bias is None else out + bias

    def scales(self, largest: Tensor) -> Tensor:
        """Tensorwise, of weights with these largest absolute values, each in the dtype that the weight is cast from."""
        scales: Tensor = float8_library().float8_utils.amax_to_scale(largest, self.of_weights)
        return scales

    def weight(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """What this product takes as a weight of `dtype` that is cast already."""
        role = self._tensors.GemmInputRole.WEIGHT
        weight: Tensor = self._tensors.Float8TrainingTensor(codes, scale, dtype, self._aligned, role)
        return weight


def codes_of(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """The eight bits and the scale of what `Product.weight` made; None: it is another tensor."""
    codes: Tensor | None = getattr(weight, "_data", None)
    return None if codes is None else (codes, weight._scale)  # type: ignore[attr-defined]


def describe_fp8(shapes: Mapping[str, Sequence[int]], scaling: Scaling) -> str:
    """How many of the blocks' matrices fp8 multiplies, of a model of these tensors."""
    sides = block_matrices(shapes).values()
    fit = sum(is_fit(*one) for one in sides)
    return f"{scaling}, {fit} of the {len(sides)} matrices of the blocks; MFU is a share of bf16's peak"


def apply_fp8(
    linears: Iterable[Any],
    scaling: Scaling | None,
    device: torch.device,
    is_offloaded: bool = False,
    is_compiled: bool = False,
) -> None:
    """Lets the `linears` (model/lora/linear.py) that are fit multiply in fp8, in place; does nothing without `scaling`."""
    if scaling is None:
        return
    casts_ahead = scaling == "tensorwise" and not is_offloaded  # as PrecisionConfig.cast_ahead
    product = Product(scaling, device.type != "cuda", casts_ahead, is_compiled)
    for linear in linears:
        if is_fit(linear.out_features, linear.in_features):
            linear.product = product
