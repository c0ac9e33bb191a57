"""Which dtype stores, computes and reduces."""

from functools import partial

import pytest
import torch

from tests.parallel.tiny import batch, each, make_program
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


SENT = [  # in which dtypes gradients are sent, and stored
    ({"policy": "bf16"}, "float32", "float32"),
    ({"policy": "bf16", "reduce": "bf16"}, "bfloat16", "float32"),
    ({"policy": "fp32", "reduce": "bf16"}, "bfloat16", "float32"),
    ({"policy": "fp16"}, "float32", "float32"),
    ({"policy": "bf16-pure"}, "float32", "bfloat16"),
    ({"policy": "bf16-pure", "reduce": "bf16"}, "bfloat16", "bfloat16"),
]


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_gradients_are_sent_and_stored_as_the_policy_says(ranks, layout):
    cases = [
        {"policy": one["policy"], "precision": {k: v for k, v in one.items() if k != "policy"}} for one, *_ in SENT
    ]
    for found in ranks.run(2, each, *(partial(sums_and_loss, LAYOUTS[layout], case) for case in cases)):
        assert found == [({f"torch.{sent}"}, {f"torch.{kept}"}, "torch.float32") for _, sent, kept in SENT]


def losses_of(layout, output):
    """(nats of one micro-batch, the dtype of the loss of a step) with a model whose output is cast."""
    program = make_program(*layout, "bf16", precision={"output": output})
    alone = program._forward(batch()).item()
    return alone, str(program.run([batch()], torch.tensor(8 * layout[0])).dtype)


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_the_output_is_cast_and_nothing_else(ranks, layout):
    outputs = (partial(losses_of, LAYOUTS[layout], output) for output in ("bf16", "fp32"))
    for (narrow, kind), (wide, _) in ranks.run(2, each, *outputs):
        assert narrow == torch.tensor(wide).bfloat16().item() != wide
        assert kind == "torch.float32", "divided and summed over ranks in fp32"


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


def test_bf16_products_and_an_fp32_loss(ranks):
    for found in ranks.run(2, each, *(partial(product_dtypes, layout) for layout in LAYOUTS.values())):
        assert found == [({"torch.bfloat16"}, "torch.float32")] * len(LAYOUTS)
