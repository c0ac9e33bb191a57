"""The head and cross-entropy in chunks of tokens: the [tokens, vocabulary] logits never exist as a whole.

With targets, the head's forward returns the loss: sum over counted targets of -log softmax(W h)_target, in nats. Loss
and head are one module's forward, so FSDP2's hooks have gathered the weight when it is used, whichever unit it lives
in. The gradient of each chunk is computed while its logits are alive, in forward; backward only scales it by the
incoming scalar:
    d loss / d logits = softmax(logits) - onehot(target),  0 where the target is -100.
Kept for backward: N D + V D elements (a frozen head: N D), in place of two or three times N V. Measured (4,096 tokens x
32,000, fp32, 2 cores): dense +1,510 MiB and 4.8 s, checkpointing per chunk +951 MiB and 4.5 s, this +203 MiB and 2.8 s.
Idea: Liger Kernel, arXiv 2410.10989.

Softmax and sums run in promote_types(dtype, float32): fp32 for bf16, fp64 for fp64. The padded columns of the
vocabulary are -inf: no probability and no gradient, whatever their rows hold.

Capped logits (Gemma 2, arXiv 2408.00118) are c tanh(l / c), and their gradient is multiplied by 1 - tanh^2(l / c).

A head whose rows are cut over ranks (`Cut`) needs three numbers per token from the others: the largest logit, the sum of
exponentials, and the target's logit, which one rank has. An all-reduce per chunk sends 3 elements per token where the logits
would be V. The loss is then the same number on every rank, and the hidden states' gradient is this rank's part of a sum
(Megatron-LM's parallel cross-entropy, arXiv 1909.08053, section 3).

Legend: B sequences, T positions, N = B T tokens, C tokens of a chunk, D hidden size, V rows of the head (padded) that are here.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from windlass.model.chunks import Chunks

IGNORED: Final = -100  # torch's and Hugging Face's label of a target that is not counted
SCALED_ELEMENTS: Final = 1 << 24  # 64 MiB of fp32 at a time


@dataclass(frozen=True)
class Cut:
    """A head's rows are cut over the ranks of `group`; this rank's begin with `first_row`. Without a group all are here."""

    group: dist.ProcessGroup | None = None
    first_row: int = 0


def chunk_loss(logits_CV: Tensor, targets_C: Tensor, cut: Cut = Cut(), weights_C: Tensor | None = None) -> Tensor:
    """The loss of each target of one chunk, over all ranks' rows, [C], each times its weight; turns `logits_CV` into d (their
    sum) / d logits in place."""
    counted_C = targets_C != IGNORED
    rows_C = targets_C - cut.first_row
    here_C = counted_C & (rows_C >= 0) & (rows_C < logits_CV.shape[1])
    rows_C1 = rows_C.where(here_C, 0)[:, None]
    largest_C1 = logits_CV.amax(-1, keepdim=True)
    if cut.group is not None:
        dist.all_reduce(largest_C1, dist.ReduceOp.MAX, cut.group)
    logits_CV.sub_(largest_C1)
    picked_C = logits_CV.gather(1, rows_C1)[:, 0].where(here_C, 0)
    total_C = logits_CV.exp_().sum(-1)
    if cut.group is not None:
        sums_2C = torch.stack((total_C, picked_C))
        dist.all_reduce(sums_2C, group=cut.group)
        total_C, picked_C = sums_2C
    loss_C = (total_C.log() - picked_C).where(counted_C, 0)
    logits_CV.div_(total_C[:, None])
    logits_CV.scatter_add_(1, rows_C1, -here_C.to(logits_CV.dtype)[:, None])
    factors_C = counted_C if weights_C is None else weights_C * counted_C
    logits_CV.mul_(factors_C[:, None])
    return loss_C if weights_C is None else loss_C * weights_C


def _logits(
    hidden_CD: Tensor, weight_VD: Tensor, vocab_size: int, cut: Cut, cap: float | None
) -> tuple[Tensor, Tensor | None]:
    """A chunk's logits, and with a cap the tanh in them."""
    logits_CV = (hidden_CD @ weight_VD.T).to(torch.promote_types(hidden_CD.dtype, torch.float32))
    tanh_CV = None
    if cap is not None:
        tanh_CV = (logits_CV / cap).tanh()
        logits_CV = cap * tanh_CV
    logits_CV[:, max(0, vocab_size - cut.first_row) :] = -torch.inf
    return logits_CV, tanh_CV


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        vocab_size: int,
        chunk_tokens: int,
        keep_hidden: bool,
        keep_weight: bool,
        cut: Cut,
        cap: float | None,
        weights_N: Tensor | None,
    ) -> Tensor:
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        loss = hidden_ND.new_zeros((), dtype=wide)
        grad_hidden_ND = torch.empty_like(hidden_ND) if keep_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if keep_weight else None
        for start in range(0, hidden_ND.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits_CV, tanh_CV = _logits(hidden_ND[chunk], weight_VD, vocab_size, cut, cap)
            weights_C = None if weights_N is None else weights_N[chunk].to(wide)
            loss += chunk_loss(logits_CV, targets_N[chunk], cut, weights_C).sum()
            if not (keep_hidden or keep_weight):
                continue
            if tanh_CV is not None:
                logits_CV.mul_(1 - tanh_CV.square())
            grad_CV = logits_CV.to(weight_VD.dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[chunk] = grad_CV @ weight_VD
            if grad_weight_VD is not None:
                grad_weight_VD += grad_CV.T @ hidden_ND[chunk]
        ctx.save_for_backward(grad_hidden_ND, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (scale,) = grads
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        grad_hidden = None if grad_hidden_ND is None else _scaled(grad_hidden_ND, scale)
        grad_weight = None if grad_weight_VD is None else _scaled(grad_weight_VD, scale)
        return grad_hidden, grad_weight, *[None] * 8


def _scaled(grad_RD: Tensor, scale: Tensor) -> Tensor:
    """grad times the 0-dim scale, rounded once. torch would round the scale to grad's dtype first: in bf16 one factor of up to
    1 +- 2^-9 on every gradient. In pieces of rows, so that the wide copy stays small."""
    if grad_RD.dtype == scale.dtype:
        return grad_RD * scale
    scaled_RD = torch.empty_like(grad_RD)
    rows = max(1, SCALED_ELEMENTS // grad_RD.shape[1])
    for start in range(0, grad_RD.shape[0], rows):
        piece = slice(start, start + rows)
        scaled_RD[piece] = grad_RD[piece].to(scale.dtype) * scale
    return scaled_RD


def as_bits(per_row_B2: Tensor) -> Tensor:
    """fp64 as int64 of the same bits: FSDP2 casts a model's floating inputs, and a weight in bf16 has three digits."""
    return per_row_B2.double().view(torch.int64)


def head_loss(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    vocab_size: int,
    chunk_tokens: int,
    cut: Cut = Cut(),
    cap: float | None = None,
    per_row_B2: Tensor | None = None,
    by_row: bool = False,
) -> Tensor:
    """The summed loss in nats, 0-dim, at least fp32; the same on every rank of `cut.group`. `vocab_size`: of the whole head.
    `cap`: logits l become cap tanh(l / cap). `per_row_B2`: a weight and an offset for each row, `as_bits`: the loss is then the
    sum over rows of weight x nats + offset. `by_row`: each row's nats, [B], without a gradient."""
    hidden_ND, targets_N, weights_N = hidden_BTD.flatten(0, 1), targets_BT.flatten(), None
    if by_row:
        nats_N = _losses(hidden_ND, weight_VD, targets_N, vocab_size, chunk_tokens, cut, cap)
        return nats_N.view_as(targets_BT).sum(1)
    offsets_B = None
    if per_row_B2 is not None:
        weights_B, offsets_B = per_row_B2.view(torch.float64).unbind(1)
        weights_N = weights_B[:, None].expand_as(targets_BT).flatten()
    # a frozen head needs no gradient of its own, and frozen blocks below it none of the hidden states
    keep = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden_BTD, weight_VD)]
    tokens = (hidden_ND, weight_VD, targets_N)
    loss: Tensor = _ChunkedCrossEntropy.apply(*tokens, vocab_size, chunk_tokens, *keep, cut, cap, weights_N)
    return loss if offsets_B is None else loss + offsets_B.sum().to(loss.dtype)


@torch.no_grad()
def _losses(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    vocab_size: int,
    chunk_tokens: int,
    cut: Cut,
    cap: float | None,
) -> Tensor:
    """Each target's loss, [N]."""
    chunks = (slice(start, start + chunk_tokens) for start in range(0, hidden_ND.shape[0], chunk_tokens))
    found = [chunk_loss(_logits(hidden_ND[c], weight_VD, vocab_size, cut, cap)[0], targets_N[c], cut) for c in chunks]
    return torch.cat(found)


class Head(nn.Linear):
    """lm_head: hidden states -> logits over the true vocabulary, or with targets the summed loss."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        padded_vocab_size: int,
        chunk_logits: int = Chunks.head_logits,
        cap: float | None = None,
    ):
        super().__init__(hidden_size, padded_vocab_size, bias=False)
        self.vocab_size, self.chunk_logits, self.cap = vocab_size, chunk_logits, cap
        self.chunk_tokens = max(1, chunk_logits // padded_vocab_size)

    def forward(
        self,
        hidden_BTD: Tensor,
        targets_BT: Tensor | None = None,
        per_row_B2: Tensor | None = None,
        by_row: bool = False,
    ) -> Tensor:
        """Logits [B, T, vocab_size] in hidden's dtype; with targets what `head_loss` returns."""
        if targets_BT is None:
            logits_BTV = functional.linear(hidden_BTD, self.weight[: self.vocab_size])
            return logits_BTV if self.cap is None else self.cap * (logits_BTV / self.cap).tanh()
        size = self.vocab_size, self.chunk_tokens
        return head_loss(hidden_BTD, self.weight, targets_BT, *size, cap=self.cap, per_row_B2=per_row_B2, by_row=by_row)
