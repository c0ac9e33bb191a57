"""A FlashAttention for CPUs, in torch's own registry: what runs below varlen_attn, written out in fp32, with a fault or none."""

import contextlib
import itertools

import torch
from torch.library import Library
from torch.nn import attention
from torch.nn.attention import _fa3, _fa4


class Handle:
    """What torch's registry keeps while an implementation is active."""

    def __init__(self, library):
        self.library = library

    def remove(self):
        self.library = None


class Kernel:
    """`fault`: what is wrong with it. `calls`: forward and backward, in order."""

    def __init__(self, fault=None):
        self.fault, self.calls = fault, []

    def register(self):
        if self.fault == "import":
            raise ImportError("undefined symbol: _ZN3c10\nfor another torch")
        library = Library("aten", "IMPL", "CPU")
        library.impl("_flash_attention_forward", self.forward, "CPU")
        library.impl("_flash_attention_backward", self.backward, "CPU")
        return Handle(library)

    def sequences(self, q, k, v, bounds_q, bounds_k, back, scale):
        """Of each: where its queries and keys are, in fp32 and with as many key heads as query heads, and its weights."""
        if self.fault == "border":
            bounds_q, bounds_k = bounds_q[[0, -1]], bounds_k[[0, -1]]
        spans = [[slice(*pair) for pair in itertools.pairwise(bounds.tolist())] for bounds in (bounds_q, bounds_k)]
        times = q.shape[1] // k.shape[1]
        for queries, keys in zip(*spans, strict=True):
            q_HQK = q[queries].float().transpose(0, 1)
            k_HSK, v_HSK = (x[keys].float().repeat_interleave(times, 1).transpose(0, 1) for x in (k, v))
            at_Q1 = torch.arange(q_HQK.shape[1])[:, None] + k_HSK.shape[1] - q_HQK.shape[1]
            at_S = torch.arange(k_HSK.shape[1])
            seen_QS = at_S <= at_Q1
            if back not in (None, -1) and self.fault != "window":
                seen_QS &= at_S >= at_Q1 - back
            scores = (q_HQK @ k_HSK.mT * (scale or q.shape[-1] ** -0.5)).masked_fill(~seen_QS, -torch.inf)
            yield queries, keys, q_HQK, k_HSK, v_HSK, scores

    def forward(self, q, k, v, bounds_q, bounds_k, _max_q, _max_k, _dropout, _is_causal, _debug=False, **options):
        self.calls.append("forward")
        out, sums = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])
        back, scale = options.get("window_size_left"), options.get("scale")
        for queries, _, _, _, v_HSK, scores in self.sequences(q, k, v, bounds_q, bounds_k, back, scale):
            out[queries] = (scores.softmax(-1) @ v_HSK).transpose(0, 1).to(q.dtype)
            sums[:, queries] = scores.logsumexp(-1)
        if self.fault == "bits":
            out += 0.002 * torch.randn_like(out)
        seeds = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        return out, sums, *seeds, torch.empty(0)

    def backward(self, grad, q, k, v, out, _sums, bounds_q, bounds_k, *_, **options):
        self.calls.append("backward")
        if self.fault == "backward":
            raise AssertionError("deterministic backward is not supported\nat line 7")
        found = [torch.zeros_like(x) for x in (q, k, v)]
        times, scale = q.shape[1] // k.shape[1], options.get("scale") or q.shape[-1] ** -0.5
        back = options.get("window_size_left")
        for queries, keys, q_HQK, k_HSK, v_HSK, scores in self.sequences(q, k, v, bounds_q, bounds_k, back, scale):
            if self.fault == "keys" and queries.start == queries.stop:  # memory that nobody has written
                found[1][keys] = 1.0
                continue
            weights, grad_HQK = scores.softmax(-1), grad[queries].float().transpose(0, 1)
            through = (grad_HQK * out[queries].float().transpose(0, 1)).sum(-1, keepdim=True)
            grad_scores = weights * (grad_HQK @ v_HSK.mT - through) * scale
            parts = grad_scores @ k_HSK, grad_scores.mT @ q_HQK, weights.mT @ grad_HQK
            found[0][queries] = parts[0].transpose(0, 1).to(q.dtype)
            for one, part in zip(found[1:], parts[1:], strict=True):
                one[keys] = part.unflatten(0, (-1, times)).sum(1).transpose(0, 1).to(q.dtype)
        return tuple(found)


@contextlib.contextmanager
def flash_on_cpu(**kernels):
    """Kernels under torch's own names, FA3 and FA4. Afterwards torch's are there again, and none is active."""
    for name, kernel in kernels.items():
        attention.register_flash_attention_impl(name, register_fn=kernel.register)
    try:
        yield
    finally:
        if attention.current_flash_attention_impl() is not None:
            attention.restore_flash_attention_impl()
        attention.register_flash_attention_impl("FA3", register_fn=_fa3.register_flash_attention_fa3)
        attention.register_flash_attention_impl("FA4", register_fn=_fa4.register_flash_attention_fa4)
