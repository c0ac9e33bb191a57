"""Which dtype stores, computes and reduces."""

import pytest
import torch

from tests.parallel.tiny import batch, gradients, make_program
from windlass.parallel.config import PrecisionConfig
from windlass.parallel.precision import precision_of

LAYOUTS = {"ddp": (2, 0, 2, 1), "zero2": (2, 2, 1, 2), "zero3": (2, 3, 1, 2)}


@pytest.mark.parametrize(
    ("policy", "stored", "compute"),
    [
        ("fp64", torch.float64, torch.float64),
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.float32, torch.bfloat16),
    ],
)
def test_policies_are_the_table_of_the_docstring(policy, stored, compute):
    precision = precision_of(PrecisionConfig(policy=policy))
    assert (precision.stored, precision.compute, precision.is_mixed) == (stored, compute, stored != compute)
    fsdp = precision.fsdp()
    assert (fsdp.param_dtype, fsdp.reduce_dtype) == ((compute, stored) if stored != compute else (None, None))
    with precision.autocast("cpu"):
        product = torch.ones(2, 2, dtype=stored) @ torch.ones(2, 2, dtype=stored)
    assert product.dtype == compute


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_keeps_fp32_masters_and_stays_near(ranks, layout):
    exact = ranks.run(2, gradients, *LAYOUTS[layout], "fp32")[0]
    mixed = ranks.run(2, gradients, *LAYOUTS[layout], "bf16")[0]
    assert set(mixed[2].values()) == {"torch.float32"}
    assert {gradient.dtype for gradient in mixed[1].values()} == {torch.float32}
    assert 0 < abs(mixed[0] - exact[0]) <= 3e-3 * exact[0], "computed in bf16, and near"
    norms = [sum(g.double().square().sum() for g in run[1].values()).sqrt() for run in (exact, mixed)]
    assert abs(norms[1] - norms[0]) <= 3e-2 * norms[0]


def product_dtypes(layout):
    """dtypes of the matrix products of one forward and backward, and that of the loss."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function._schema.name in ("aten::mm", "aten::addmm", "aten::bmm"):
                seen.add(str(out.dtype))
            return out

    program = make_program(*layout, "bf16")
    with Products():
        loss = program.run([batch()], torch.tensor(8.0 * layout[0]))
    return seen, str(loss.dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_products_and_an_fp32_loss(ranks, layout):
    for products, loss in ranks.run(2, product_dtypes, LAYOUTS[layout]):
        assert products == {"torch.bfloat16"} and loss == "torch.float32"
