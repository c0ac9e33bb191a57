"""NF4: sizes, levels, cuts, and what a product keeps."""

import pytest
import torch
from torch.nn import functional

from windlass.model.lora.adapter import BLOCK
from windlass.model.lora.nf4 import LEVELS, dequantize, product, quantize
from windlass.proof.reference_adapter import round_to_nf4


def drawn(rows, columns, dtype=torch.float32, seed=1):
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_element_takes_the_level_nearest_to_it(dtype):
    weight = drawn(24, 3 * BLOCK, dtype)
    codes, scales = quantize(weight)
    assert torch.equal(dequantize(codes, scales, dtype), round_to_nf4(weight)), (
        "as the definition has it, written a second time"
    )
    unit = weight.double().unflatten(-1, (-1, BLOCK)) / scales.double()[..., None]
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    taken = dequantize(codes, torch.ones_like(scales), torch.float64).unflatten(-1, (-1, BLOCK))
    nearest = (unit[..., None] - levels).abs().min(-1).values
    assert ((unit - taken).abs() - nearest).max() <= 1e-6


def test_bytes_and_error():
    """0.53125 bytes per element; the error that normally distributed weights have with bf16 scales."""
    weight = drawn(256, 4096)
    codes, scales = quantize(weight)
    assert (codes.dtype, scales.dtype) == (torch.uint8, torch.bfloat16)
    assert (codes.nbytes + scales.nbytes) / weight.numel() == 0.53125
    error = (dequantize(codes, scales, torch.float32) - weight).norm() / weight.norm()
    assert float(error) == pytest.approx(0.092, abs=0.001)


def test_a_part_quantizes_as_its_part_of_the_whole():
    weight = drawn(9, 4 * BLOCK)
    codes, scales = quantize(weight)
    part_codes, part_scales = quantize(weight[2:5, BLOCK : 3 * BLOCK])
    assert torch.equal(part_codes, codes[2:5, BLOCK // 2 : 3 * BLOCK // 2])
    assert torch.equal(part_scales, scales[2:5, 1:3])


def test_a_block_of_zeros_stays_zero():
    codes, scales = quantize(torch.zeros(2, BLOCK))
    assert not dequantize(codes, scales, torch.float32).any()


def test_a_product_keeps_no_matrix_for_backward():
    """Its gradient is that of the dequantised matrix; what autograd saves does not grow with it."""
    codes, scales = quantize(drawn(48, 2 * BLOCK))
    x = drawn(5, 2 * BLOCK, seed=2).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        out = product(x, codes, scales)
    assert {tensor.data_ptr() for tensor in saved} == {codes.data_ptr(), scales.data_ptr()}
    out.square().sum().backward()
    plain = x.detach().requires_grad_()
    functional.linear(plain, dequantize(codes, scales, torch.float32)).square().sum().backward()
    assert torch.equal(x.grad, plain.grad)
