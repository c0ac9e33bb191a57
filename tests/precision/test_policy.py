"""Which dtype stores, computes and reduces."""

import pytest
import torch

from tests.parallel.tiny import batch, gradients, make_program
from windlass.precision.config import PrecisionConfig
from windlass.precision.policy import precision_of

LAYOUTS = {"ddp": (2, 0, 2, 1), "zero2": (2, 2, 1, 2), "zero3": (2, 3, 1, 2)}


FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("settings", "stored", "compute", "gathered", "reduced"),
    [
        ({"policy": "fp64"}, FP64, FP64, None, None),
        ({"policy": "fp32"}, FP32, FP32, None, None),
        ({"policy": "fp32", "reduce": "bf16"}, FP32, FP32, None, BF16),
        ({"policy": "bf16"}, FP32, BF16, BF16, FP32),
        ({"policy": "bf16", "reduce": "bf16"}, FP32, BF16, BF16, BF16),
        ({"policy": "fp16"}, FP32, FP16, FP16, FP32),
        ({"policy": "bf16-pure"}, BF16, BF16, None, FP32),
        ({"policy": "bf16-pure", "reduce": "bf16"}, BF16, BF16, None, None),
        ({"policy": "bf16-pure", "parameters": "fp32"}, BF16, FP32, FP32, FP32),
    ],
)
def test_policies_are_the_table_of_the_docstring(settings, stored, compute, gathered, reduced):
    precision = precision_of(PrecisionConfig(**settings))
    assert (precision.stored, precision.compute, precision.is_mixed) == (stored, compute, stored != compute)
    assert precision.is_scaled == (settings["policy"] == "fp16")
    fsdp = precision.fsdp()
    assert (fsdp.param_dtype, fsdp.reduce_dtype, fsdp.output_dtype) == (gathered, reduced, None)
    if precision.compute != FP32 or stored == FP32:  # DDP cannot widen, and is refused
        with precision.autocast("cpu"):
            product = torch.ones(2, 2, dtype=stored) @ torch.ones(2, 2, dtype=stored)
        assert product.dtype == compute


def sums_and_loss(layout, settings):
    """(dtypes that gradients are sent in, the dtypes of gradients and of the loss) of a step."""
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    sent = set()

    class Sent(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if any(kind in function._schema.name for kind in ("reduce_scatter", "allreduce", "all_reduce")):
                flat, _ = torch.utils._pytree.tree_flatten(args)
                sent.update(str(x.dtype) for x in flat if isinstance(x, torch.Tensor) and x.dim())
            return function(*args, **(kwargs or {}))

    program = make_program(*layout, **settings)
    with Sent():
        loss = program.run([batch(dist.get_rank())], torch.tensor(8.0 * layout[0]))
    return sent, {str(record.tensor.grad.dtype) for record in program.records()}, str(loss.dtype)


@pytest.mark.parametrize(
    ("settings", "sent", "gradients"),
    [
        ({"policy": "bf16"}, "float32", "float32"),
        ({"policy": "bf16", "reduce": "bf16"}, "bfloat16", "float32"),
        ({"policy": "fp32", "reduce": "bf16"}, "bfloat16", "float32"),
        ({"policy": "fp16"}, "float32", "float32"),
        ({"policy": "bf16-pure"}, "float32", "bfloat16"),
        ({"policy": "bf16-pure", "reduce": "bf16"}, "bfloat16", "bfloat16"),
    ],
)
@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_gradients_are_sent_and_stored_as_the_policy_says(ranks, layout, settings, sent, gradients):
    settings = {"policy": settings["policy"], "precision": {k: v for k, v in settings.items() if k != "policy"}}
    for found in ranks.run(2, sums_and_loss, LAYOUTS[layout], settings):
        assert found == ({f"torch.{sent}"}, {f"torch.{gradients}"}, "torch.float32")


def losses_of(layout, output):
    """(nats of one micro-batch, the dtype of the loss of a step) with a model whose output is cast."""
    program = make_program(*layout, "bf16", precision={"output": output})
    alone = program._forward(batch()).item()
    return alone, str(program.run([batch()], torch.tensor(8 * layout[0])).dtype)


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_the_output_is_cast_and_nothing_else(ranks, layout):
    for (narrow, kind), (wide, _) in zip(
        ranks.run(2, losses_of, LAYOUTS[layout], "bf16"), ranks.run(2, losses_of, LAYOUTS[layout], "fp32"), strict=True
    ):
        assert narrow == torch.tensor(wide).bfloat16().item() != wide
        assert kind == "torch.float32", "divided and summed over ranks in fp32"


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
