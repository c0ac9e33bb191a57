"""What a training step on one GPU should cost: a sum of terms per token, each bytes or FLOPs over a rate.

    products      6 N / R                     N: weights that multiply every token
    attention     f / a_f + 2.5 f / a_b       f = 2 L q T: causal scores and values forward; backward has five products for two
    elementwise   2 L (21 h + 9 i + 4 (q + kv)) bytes: norms with their residual, rope, gated MLP, forward and backward,
                  each fused into one pass; eager passes take 2.6 times that
    loss          bytes per vocabulary entry that the compiled loss moves, as step_bytes.py counts them
                  (dense with an fp32 copy: 42, counted from the operators: cast, log_softmax, nll, and their backwards)
    optimizer     bytes per parameter and step that the compiled update moves, as step_bytes.py counts them: p, m, v read and
                  written in fp32, the gradient read by norm and update, the 16-bit copy (bf16 m and v: 8 fewer; bf16 weights
                  too: 16; foreach: 72, one pass per arithmetic operation)
    sums          8 bytes per parameter and micro-batch: a product reads and writes the gradient's fp32 sum; 4 once per step,
                  which clear it (bf16 weights: 4, where micro-batches are added up). No weight is cast
    recompute     full: the blocks' forward once more

Two sets of rates. LIMIT: the best that one H200 was seen to do in matrix products (790 of 989 TFLOP/s) and copies (4.3 of
4.8 TB/s), attention as published for Hopper. PRACTICAL: 730 TFLOP/s, 3.9 TB/s, slower attention, 15 % more bytes, 1.5 % gaps.
Against the best public figure (Llama-3-8B, T 4096, one H200, full recomputation, all in bf16: 10,471 tokens/s) PRACTICAL is
4.4 % low. Another device gets the same shares of its own peak and bandwidth.

fp8 has no estimate: its products, and the casts in the kernels around them, are not in the model. The rates are a model to be
judged by the measurements beside it, and no measurement themselves.

Legend: L layers, h hidden, i MLP width, q query and kv key channels of all heads, T sequence length.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from windlass.hardware import Device
from windlass.model.architecture import Architecture
from windlass.model.flops import count_multiplied, count_parameters

H200_PEAK, H200_BANDWIDTH = 989.4e12, 4.8e12


@dataclass(frozen=True)
class Rates:
    """FLOP/s of matrix products and causal attention, bytes/s, how many more bytes are moved, the share that is idle."""

    products: float
    attention_forward: float
    attention_backward: float
    bandwidth: float
    more_bytes: float
    gaps: float


LIMIT = Rates(790e12, 640e12, 540e12, 4.3e12, 1.0, 0.0)
PRACTICAL = Rates(730e12, 600e12, 480e12, 3.9e12, 1.15, 0.015)
MASKED_ATTENTION = 127e12
"""Causal FLOP/s, forward and backward, of an attention that is given a dense mask: it computes both halves, on a kernel that
is slower too. Chosen so that such a step of SmolLM3-3B at 8,192 takes 66 % longer, as reckoned for transformers' own mask."""
EAGER_BYTES = 2.6
COUNTED = json.loads((Path(__file__).parents[1] / "results" / "step_bytes.json").read_text())["rows"]
DENSE_LOSS_BYTES, CHUNKED_LOSS_BYTES = 42, COUNTED["loss compiled, bf16"]["bytes_per_logit"]
UPDATE_BYTES = COUNTED["update compiled, gradients in fp32"]["bytes_per_parameter"]
OPTIMIZER_BYTES = {
    ("fused", "bf16", "fp32"): UPDATE_BYTES,
    ("fused", "bf16", "bf16"): UPDATE_BYTES - 8,
    ("foreach", "bf16", "fp32"): 72,
    ("fused", "bf16-pure", "bf16"): 16,
}
HEAD_TOKENS = 8192  # of a chunk, at most (model/chunks.py)
STATE_BYTES = {("bf16", "fp32"): 16, ("bf16", "bf16"): 12, ("bf16-pure", "bf16"): 8}  # weights, gradients, two moments


@dataclass(frozen=True)
class Work:
    """What one step is made of, as far as it changes its cost."""

    sequence_length: int
    tokens_per_step: int
    tokens_per_micro_batch: int
    recompute: str = "none"
    compile: bool = True
    loss: str = "chunked"
    kernel: str = "fused"
    policy: str = "bf16"
    states: str = "fp32"
    attention: str = "causal"
    more_bytes: int = 0
    """Kept per parameter beside STATE_BYTES: 2 of copies for products; -2 where gradients are added up in bf16."""


def on(device: Device, rates: Rates) -> Rates:
    """The same shares of another device's peak and bandwidth."""
    compute, memory = device.peak_flops / H200_PEAK, device.bandwidth / H200_BANDWIDTH
    return replace(
        rates,
        products=rates.products * compute,
        attention_forward=rates.attention_forward * compute,
        attention_backward=rates.attention_backward * compute,
        bandwidth=rates.bandwidth * memory,
    )


def seconds_per_token(arch: Architecture, work: Work, rates: Rates) -> dict[str, float]:
    """Term -> seconds; `total` is their sum with the gaps."""
    layers, hidden, inner = arch.num_layers, arch.hidden_size, arch.intermediate_size
    q_and_kv = (arch.num_heads + arch.num_kv_heads) * arch.head_dim
    parameters, multiplied = count_parameters(arch), count_multiplied(arch)
    in_blocks = multiplied - arch.vocab_size * hidden
    scores = 2.0 * layers * arch.num_heads * arch.head_dim * work.sequence_length
    masked = work.attention == "masked"
    forward_rate = MASKED_ATTENTION if masked else rates.attention_forward
    backward_rate = MASKED_ATTENTION if masked else rates.attention_backward
    bandwidth = rates.bandwidth / rates.more_bytes
    eager = 1.0 if work.compile else EAGER_BYTES
    forward_bytes = 2.0 * layers * (8 * hidden + 2 * q_and_kv + 3 * inner) * eager
    backward_bytes = 2.0 * layers * (13 * hidden + 2 * q_and_kv + 6 * inner) * eager
    again = 2.0 * in_blocks / rates.products + scores / forward_rate + forward_bytes / bandwidth
    accumulates = work.tokens_per_step > work.tokens_per_micro_batch
    optimizer = OPTIMIZER_BYTES[work.kernel, work.policy, work.states]
    of_step, of_micro_batch = (4, 8) if work.policy == "bf16" else (0, 4 * accumulates)
    terms = {
        "products": 6.0 * multiplied / rates.products,
        "attention": scores / forward_rate + 2.5 * scores / backward_rate,
        "elementwise": (forward_bytes + backward_bytes) / bandwidth,
        "loss": (CHUNKED_LOSS_BYTES if work.loss == "chunked" else DENSE_LOSS_BYTES) * arch.vocab_size / bandwidth,
        "recompute": again if work.recompute == "full" else 0.0,
        "optimizer": optimizer * parameters / rates.bandwidth / work.tokens_per_step,
        "sums": (of_step / work.tokens_per_step + of_micro_batch / work.tokens_per_micro_batch)
        * parameters
        / rates.bandwidth,
    }
    if work.recompute == "selective":  # the elementwise part of the forward, and none of its products
        terms["recompute"] = forward_bytes / bandwidth
    return terms | {"total": sum(terms.values()) * (1 + rates.gaps)}


def tokens_per_s(arch: Architecture, work: Work, rates: Rates) -> float:
    return 1 / seconds_per_token(arch, work, rates)["total"]


def least_bytes(arch: Architecture, work: Work) -> float:
    """Memory that a step cannot do without: parameters, gradients and states, and what the blocks must keep. Used to skip
    what cannot fit, so it is a lower bound: 4 (h + q + kv) + 6 i bytes per token and layer; selective recomputation
    2 h + 4 (q + kv + i), full 2 h. Beside them the head's chunk of logits and its weight's gradient in fp32 and bf16. (One
    H200, torch 2.11: SmolLM3-3B, 2 x 8,192, none: 107.2 GiB measured, 101.4 here.)"""
    states = count_parameters(arch) * (STATE_BYTES[work.policy, work.states] + work.more_bytes)
    outside = 4 * (arch.hidden_size + (arch.num_heads + arch.num_kv_heads) * arch.head_dim)
    inner = arch.intermediate_size
    per_layer = {
        "none": outside + 6 * inner,
        "selective": outside + 4 * inner - 2 * arch.hidden_size,
        "full": 2 * arch.hidden_size,
    }
    tokens = work.tokens_per_micro_batch
    head = arch.vocab_size * (2 * min(tokens, HEAD_TOKENS) + 6 * arch.hidden_size)
    return states + tokens * arch.num_layers * per_layer[work.recompute] + head
