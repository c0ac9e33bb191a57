"""Recomputation: throw activations away in forward, compute them again in backward.

A block of hidden size D keeps about 34 B T D bytes of activations in 16 bits for a micro-batch of B sequences of T tokens, plus
attention's (Korthikanti et al., arXiv 2205.05198). Each kind keeps, at this cost:

    none        everything; no extra work
    selective   the outputs of matrix products and attention; norms, activations, rope and residuals are recomputed
                (a few per cent of the time, since they are bound by memory and not by FLOPs)
    full        each block's input only, B T D; the whole forward again: 1/3 more FLOPs

Within a budget of bytes each block has its own kind; activations.py chooses.

What is recomputed is replaced on the instance, so parameter names do not change. Nothing random may run inside a
block: dropout is a function of counters, so recomputation sees the same mask without saving generator states.

A sparse layer has selective around each half, since only the first is compiled, and keeps the stream between them. Where its
experts are dealt out over ranks, the second half has it around their products alone, so that no message is sent twice: its norm,
its router and the rows that came are kept.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from windlass.model.moe import MoE
from windlass.model.transformer import Block

KEPT: Final = frozenset(
    {
        "aten.mm.default",
        "aten.addmm.default",
        "aten.bmm.default",
        "aten._grouped_mm.default",
        "aten._scaled_mm.default",
        "aten.topk.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "windlass.flash_by_document.default",
        "torch_attn._varlen_attn.default",
        "_c10d_functional.reduce_scatter_tensor.default",
    }
)
"""The expensive operators: a FLOP of theirs costs more to repeat than their output costs to keep. By name, since two of them
exist only once the file that makes them is imported."""


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if str(operator) in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def apply_recompute(blocks: Sequence[Block], kinds: Sequence[str]) -> None:
    """kinds: none, selective or full, for each block; in place. Must come before compile, which traces the forward it finds:
    one graph per kind."""
    for block, kind in zip(blocks, kinds, strict=True):
        if kind == "selective" and isinstance(block.mlp, MoE):
            _recompute_halves(block, block.mlp)
        elif kind != "none":
            block.forward = _recomputed(block.forward, selective=kind == "selective")  # type: ignore[method-assign]


def _recompute_halves(block: Block, mlp: MoE) -> None:
    block.first_half = _recomputed(block.first_half, selective=True)  # type: ignore[method-assign]
    if mlp.experts.exchange is None:
        block.second_half = _recomputed(block.second_half, selective=True)  # type: ignore[method-assign]
    else:  # inside their unit, and without their messages
        mlp.experts.compute = _recomputed(mlp.experts.compute, selective=True)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    """A function and not a functools.partial: torch.compile traces it, and with it the checkpoint as one graph."""
    context: Any = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if selective else {}
    if selective:  # compiled, torch asks on every rank that nothing in the region writes in place: no block does
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)

    def recomputed_forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **context, **kwargs)

    return recomputed_forward
