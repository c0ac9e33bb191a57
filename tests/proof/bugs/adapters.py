"""Low-rank factors and bases in four bits."""

from tests.proof.bugs.bug import Bug

TENSOR, NF4, LINEAR, BUILD = "parallel/tensor.py", "model/lora/nf4.py", "model/lora/linear.py", "parallel/build.py"

# fmt: off
# ruff: noqa: E501  texts of the source, whole lines of it
ADAPTERS = {
    "A's gradients left apart": Bug(
        "every tensor rank holds A of a matrix cut by rows, and sees its own part of the outputs: the parts are not summed",
        ((TENSOR, "self.factors(shared, own)", "self.factors(own, own)"),),
        ("exact: qwen3 tied: tp2 lora", "exact: qwen3 tied wide: tp2 nf4"),
    ),
    "B's gradients left apart": Bug(
        "every tensor rank holds B of a matrix cut by columns, and sees its own part of the inputs: the parts are not summed",
        ((TENSOR, "self.factors(own, shared)", "self.factors(own, own)"),),
        ("exact: qwen3 tied: tp2 lora",),
    ),
    "B read as a whole": Bug(
        "B of a matrix cut by rows is cut too: each rank's gradient is that of its own rows, and not one part of a sum",
        ((TENSOR, "self.factors(shared, own)", "self.factors(shared, shared)"),),
        ("exact: qwen3 tied: tp2 lora",),
    ),
    "factors beside a cut matrix are left out": Bug(
        "an adapter around a parallel layer that its forward leaves out",
        ((TENSOR, "return multiply(x, dropped, matrix, bias, factors, self.scale)", "return multiply(x, dropped, matrix, bias, factors, 0 * self.scale)"),),
        ("exact: qwen3 tied: tp2 lora",),
    ),
    "the neighbour's scales": Bug(
        "a part of a quantised matrix is read with the scales of the row before",
        ((NF4, "* scales.to(dtype)[..., None]", "* scales.roll(1, 0).to(dtype)[..., None]"),),
        ("exact: qwen3 tied wide: zero2 shard2 nf4",),
    ),
    "the halves of a byte swapped": Bug(
        "the first of two elements is the high half where it is written, and the low half where it is read",
        ((NF4, "torch.stack((codes >> 4, codes & 15), -1)", "torch.stack((codes & 15, codes >> 4), -1)"),),
        ("exact: qwen3 tied wide: zero2 shard2 nf4",),
    ),
    "alpha is not divided by the rank": Bug(
        "the product of the factors is scaled by something else than alpha / rank",
        ((LINEAR, "= scale, probability, site", "= scale * rank, probability, site"),),
        ("exact: qwen3 tied: shard2 lora",),
    ),
    "a mask of this rank's own columns": Bug(
        "every tensor rank drops its part of a row matrix's input as if its columns were the first",
        ((TENSOR, "+ self.mesh.get_local_rank() * num", "+ 0 * num"),),
        ("masks: qwen3 tied: tp2 zero0 micro4 lora-drops",),
    ),
    "a mask of this context rank's own positions": Bug(
        "the positions of a row's slices are counted from 0 on every context rank",
        ((LINEAR, "dropout(x, self.dropout, keys_B, self.site, positions_T)", "dropout(x, self.dropout, keys_B, self.site)"),),
        ("masks: qwen3 tied: context2 allgather lora-drops",),
    ),
    "the base is trained too": Bug(
        "parameters that are to be frozen have gradients, and the optimizer steps them",
        ((BUILD, "{*frozen, *base}, recompute,", "{*frozen}, recompute,"),),
        ("exact: qwen3 tied: shard2 lora",),
    ),
}
