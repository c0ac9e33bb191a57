"""Parameters and floating-point operations per token, exact for the matrix products of this decoder. No torch.

A matrix of n weights costs 2 n per token forward and 4 n backward. Attention with full scores costs 4 L H K T forward
per token (scores and their product with the values, T keys each), twice that backward; the maths needs only the
causal half. Not counted, as is usual: the embedding lookup, norms, activations, rotary positions, softmax, the
optimizer. Grouped key/value heads make the projections smaller, not the scores. A tied head is counted once, as the
head.

In a mixture of experts a token is multiplied by K of E experts, so K / E of their weights count ("active"), and the router's
matrix whole; in all three conventions.

Three conventions, because published figures mix them: `six_n` = 6 N over all parameters (Kaplan et al., arXiv
2001.08361); `palm` = 6 N + 12 L H K T over the multiplied weights, full attention (PaLM, arXiv 2204.02311, appendix B);
`causal` = the same with half the attention (Megatron-LM, MaxText), and no key outside a sliding window: only work that
the maths needs, so it is the headline.

Legend: L layers, H query heads, K channels per head, T sequence length, N parameters.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from windlass.model.architecture import Architecture, parameter_shapes
from windlass.model.lora.adapter import A, Adapter, B, adapted_shapes, frozen_base, is_factor
from windlass.units import format_count


@dataclass(frozen=True)
class FlopsPerToken:
    """Forward and backward FLOPs per token of one step, in three conventions."""

    six_n: float
    palm: float
    causal: float


def count_parameters(arch: Architecture) -> int:
    """All parameters of the unpadded model; a tied head counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(arch).values())


def count_active(arch: Architecture) -> int:
    """Parameters that one token uses: all, but of a mixture's experts only those that it is sent to."""
    return sum(active(arch, shape) for shape in parameter_shapes(arch).values())


def describe_experts(arch: Architecture) -> str:
    """A sentence on the experts, for a model that has them: how many a token meets, and whether routers are balanced."""
    balance = (
        f"routers balanced by {arch.router_loss_scale:g} x their loss"
        if arch.router_loss
        else "routers not balanced (model.output_router_logits=true adds their loss)"
    )
    return (
        f"{arch.experts_per_token} of {arch.num_experts} in {len(arch.sparse_layers)} of {arch.num_layers} layers, "
        f"{format_count(count_active(arch))} parameters in a token; {balance}"
    )


def active(arch: Architecture, shape: tuple[int, ...]) -> int:
    """Weights of a parameter that a token meets: K of E matrices of experts [E, out, in], all of any other."""
    whole = math.prod(shape)
    return whole // arch.num_experts * arch.experts_per_token if len(shape) == 3 else whole


def count_multiplied(arch: Architecture) -> int:
    """Weights that multiply a token: the matrices of blocks and head, without lookups, norms and biases; active experts only."""
    head = arch.vocab_size * arch.hidden_size
    return head + sum(active(arch, s) for n, s in parameter_shapes(arch).items() if len(s) >= 2 and ".layers." in n)


def flops_per_token(
    arch: Architecture, sequence_length: int, frozen: Collection[str] = (), adapter: Adapter | None = None
) -> FlopsPerToken:
    """FLOPs of forward and backward, divided by the tokens, for sequences of `sequence_length` tokens.

    `frozen`: names of parameters that are not trained. Nobody computes their gradients, nor the backward before the first
    trained parameter: palm and causal leave that work out, and six_n stays the plain convention. An `adapter` freezes its base,
    and its factors multiply too.
    """
    backward, shares = _backward(arch, frozenset(frozen) | frozen_base(arch, adapter), adapter)
    factors = sum(math.prod(shape) for name, shape in adapted_shapes(arch, adapter).items() if is_factor(name))
    products = 2.0 * (count_multiplied(arch) + factors) + backward
    window = min(arch.window or sequence_length, sequence_length)
    seen = window - window**2 / (2 * sequence_length)  # mean number of keys; T / 2 without a window
    full = causal = 0.0
    for layer, share in enumerate(shares):
        per_key = (4.0 + 8.0 * share) * arch.num_heads * arch.head_dim
        full += per_key * sequence_length
        causal += per_key * (seen if layer in arch.window_layers else sequence_length / 2)
    return FlopsPerToken(6.0 * count_active(arch), products + full, products + causal)


def recomputed_flops(arch: Architecture, sequence_length: int) -> float:
    """FLOPs per token that `recompute: full` does a second time in every block; `selective` repeats no matrix product. MFU leaves
    them out, HFU (hardware FLOPs utilization) has them. torch stops a recomputation at the last tensor that backward reads, so
    the last product of a dense block, whose result no gradient needs, is not done again."""
    shapes = parameter_shapes(arch)
    again = float(count_multiplied(arch) - arch.vocab_size * arch.hidden_size)
    for layer in range(arch.num_layers):
        block = f"model.layers.{layer}"
        if f"{block}.post_mlp_layernorm.weight" not in shapes:
            again -= math.prod(shapes.get(f"{block}.mlp.down_proj.weight", (0,)))
    window = min(arch.window or sequence_length, sequence_length)
    seen = window - window**2 / (2 * sequence_length)
    keys = sum(seen if layer in arch.window_layers else sequence_length / 2 for layer in range(arch.num_layers))
    return 2.0 * again + 4.0 * arch.num_heads * arch.head_dim * keys


def _backward(arch: Architecture, frozen: frozenset[str], adapter: Adapter | None) -> tuple[float, list[float]]:
    """(FLOPs per token of the matrices' backward, per layer the share of attention's backward that is done).

    A matrix of n weights: 2 n for its own gradient if it is trained, 2 n for its input's if anything before it is. Attention:
    one product each for the gradients of values, scores, queries and keys.
    """
    shapes, factors = parameter_shapes(arch), adapted_shapes(arch, adapter)

    def trained(*modules: str) -> bool:
        return any(n not in frozen and n.startswith(tuple(f"{module}." for module in modules)) for n in factors)

    def matmul_flops(matrix: str, input_needs_grad: bool) -> float:
        shape = shapes.get(f"{matrix}.weight", (arch.vocab_size, arch.hidden_size) if matrix == "lm_head" else (0,))
        weight = "model.embed_tokens.weight" if matrix == "lm_head" and arch.tied else f"{matrix}.weight"
        a, b = (2.0 * math.prod(factors.get(f"{matrix}.{factor}", (0,))) for factor in (A, B))
        own = 2.0 * active(arch, shape) * (input_needs_grad + (weight not in frozen))
        return own + a * (input_needs_grad + 1) + b * 2  # A's input may need no gradient, B's is A's

    flops, shares, sparse = 0.0, [], set(arch.sparse_layers)
    needs_grad = trained("model.embed_tokens", "model.embed_positions")  # the input of the product that follows
    for layer in range(arch.num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        block = f"model.layers.{layer}"
        needs_grad |= trained(f"{block}.input_layernorm")
        before_attention = needs_grad  # what an MLP beside attention reads
        q, k, v = (needs_grad or trained(f"{attention}.{x}_proj", f"{attention}.{x}_norm") for x in "qkv")
        shares.append((v + (q or k) + q + k) / 4)
        flops += sum(matmul_flops(f"{attention}.{x}_proj", needs_grad) for x in "qkv")
        flops += matmul_flops(f"{attention}.o_proj", q or k or v)
        after_attention = q or k or v or trained(f"{attention}.o_proj", f"{block}.post_self_attn_layernorm")
        in_series = after_attention or trained(f"{block}.post_attention_layernorm")
        needs_grad = before_attention if arch.parallel_block else in_series
        if layer in sparse:
            flops += matmul_flops(f"{mlp}.gate", needs_grad)
            needs_grad, mlp = needs_grad or trained(f"{mlp}.gate"), f"{mlp}.experts"
        hidden_needs_grad = needs_grad or trained(f"{mlp}.gate_proj", f"{mlp}.up_proj")
        flops += matmul_flops(f"{mlp}.gate_proj", needs_grad) + matmul_flops(f"{mlp}.up_proj", needs_grad)
        flops += matmul_flops(f"{mlp}.down_proj", hidden_needs_grad)
        needs_grad = after_attention or hidden_needs_grad or trained(f"{mlp}.down_proj", f"{block}.post_mlp_layernorm")
    return flops + matmul_flops("lm_head", needs_grad or trained("model.norm")), shares
