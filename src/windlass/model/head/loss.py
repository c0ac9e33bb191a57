"""The head and cross-entropy in chunks of tokens: the [tokens, vocabulary] logits never exist as a whole.

With targets, the head's forward returns the loss: sum over counted targets of -log softmax(W h)_target, in nats. Loss
and head are one module's forward, so FSDP2's hooks have gathered the weight when it is used, whichever unit it lives
in. The gradient of each chunk is computed while its logits are alive, in forward; backward only scales it by the
incoming scalar:
    d loss / d logits = softmax(logits) - onehot(target),  0 where the target is -100.
Where the caller knows the factor that the loss is multiplied by (1 / count), the gradient is multiplied by it in the chunk, and
backward hands it on as it is. Kept for backward: N D + V D elements (a frozen head: N D), in place of two or three times N V.
Measured (4,096 tokens x 32,000, fp32, 2 cores): dense +1,510 MiB and 4.8 s, checkpointing per chunk +951 MiB and 4.5 s, this
+203 MiB and 2.8 s.
Idea: Liger Kernel, arXiv 2410.10989.

Bytes moved per logit in bf16 (benchmarks/step_bytes.py): 70 by these operators, 10 compiled on a CPU (one_pass.py); of both 2
are a product's write and 4 the reads of the two products of the gradient. On a GPU 12 are expected; none has run it.

Softmax and sums run in promote_types(dtype, float32): fp32 for bf16, fp64 for fp64. The padded columns of the
vocabulary are -inf: no probability and no gradient, whatever their rows hold.

Capped logits (Gemma 2, arXiv 2408.00118) are c tanh(l / c), and their gradient is multiplied by 1 - tanh^2(l / c).

A head whose rows are cut over ranks (`Cut`) needs three numbers per token from the others: the largest logit, the sum of
exponentials, and the target's logit, which one rank has. Two all-reduces per chunk, a maximum of 1 element per token and a sum
of 2, take the place of V logits. The loss is then the same number on every rank, and the hidden states' gradient is this rank's
part of a sum (Megatron-LM's parallel cross-entropy, arXiv 1909.08053, section 3).

Legend: B sequences, T positions, N = B T tokens, C tokens of a chunk, D hidden size, V rows of the head (padded) that are here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.data.batch_fields import NOT_COUNTED

SCALED_ELEMENTS: Final = 1 << 24  # 64 MiB of fp32 at a time


@dataclass(frozen=True)
class Cut:
    """A head's rows are cut over the ranks of `group`; this rank's begin with `first_row`. Without a group all are here."""

    group: dist.ProcessGroup | None = None
    first_row: int = 0


@dataclass(frozen=True)
class LossForm:
    """How a head computes its loss. `vocab_size`: of the whole head. `chunk_tokens`: logits that exist at a time. `cap`: logits l
    become cap tanh(l / cap). `one_pass`: one_pass.py's function, compiled; None: operator by operator."""

    vocab_size: int
    chunk_tokens: int
    cut: Cut = Cut()
    cap: float | None = None
    one_pass: Callable[..., Tensor] | None = None


def chunk_loss(logits_CV: Tensor, targets_C: Tensor, cut: Cut = Cut(), factors: Tensor | None = None) -> Tensor:
    """The loss of each target of one chunk, over all ranks' rows, [C]; turns `logits_CV` into the gradient of their sum, each
    times its factor, in place."""
    counted_C = targets_C != NOT_COUNTED
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
    logits_CV.mul_((counted_C if factors is None else factors * counted_C)[:, None])
    return loss_C


def _logits(hidden_CD: Tensor, weight_VD: Tensor, form: LossForm) -> tuple[Tensor, Tensor | None]:
    """A chunk's logits, and with a cap the tanh in them."""
    logits_CV = (hidden_CD @ weight_VD.T).to(_wide(hidden_CD))
    tanh_CV = None
    if form.cap is not None:
        tanh_CV = (logits_CV / form.cap).tanh()
        logits_CV = form.cap * tanh_CV
    logits_CV[:, max(0, form.vocab_size - form.cut.first_row) :] = -torch.inf
    return logits_CV, tanh_CV


def _loss_and_gradient(
    hidden_CD: Tensor, weight_VD: Tensor, targets_C: Tensor, form: LossForm, factors: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    """A chunk's losses, [C], and with `keep` the gradient of its logits, in their dtype, each token's times its
    factor: `factors` is [C], of each token, or 0-dim, of all."""
    if form.one_pass is not None:
        logits_CV = hidden_CD @ weight_VD.T
        return form.one_pass(logits_CV, targets_C, factors, form.vocab_size, form.cap, keep), logits_CV
    logits_CV, tanh_CV = _logits(hidden_CD, weight_VD, form)
    loss_C = chunk_loss(logits_CV, targets_C, form.cut, factors)
    if keep and tanh_CV is not None:
        logits_CV.mul_(1 - tanh_CV.square())
    return loss_C, logits_CV.to(weight_VD.dtype) if keep else logits_CV


class _ChunkedCrossEntropy(torch.autograd.Function):
    """`weights_N`: of each token's nats. `factor`: of their sum, 0-dim; with one, gradients are those of the product already, so
    backward must begin with 1, and does not look. `seen`: is called with each token's nats, [N]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        form: LossForm,
        keep_hidden: bool,
        keep_weight: bool,
        weights_N: Tensor | None,
        factor: Tensor | None,
        seen: Callable[[Tensor], None] | None,
    ) -> Tensor:
        wide = _wide(hidden_ND)
        losses: list[Tensor] = []
        loss = hidden_ND.new_zeros((), dtype=wide)
        grad_hidden_ND = torch.empty_like(hidden_ND) if keep_hidden else None
        grad_weight_VD: Tensor | None = None
        weights_N = None if weights_N is None else weights_N.to(wide)
        for start in range(0, hidden_ND.shape[0], form.chunk_tokens):
            chunk = slice(start, start + form.chunk_tokens)
            tokens = hidden_ND[chunk], weight_VD, targets_N[chunk]
            weights_C = None if weights_N is None else weights_N[chunk]
            factors = _product(weights_C, factor)  # of each token, or of all
            loss_C, grad_CV = _loss_and_gradient(*tokens, form, factors, keep_hidden or keep_weight)
            loss += (loss_C if weights_C is None else loss_C * weights_C).sum()
            if seen is not None:
                losses.append(loss_C)
            if grad_hidden_ND is not None:
                grad_hidden_ND[chunk] = grad_CV @ weight_VD
            if keep_weight:
                grad_weight_VD = _add_product(grad_weight_VD, grad_CV, hidden_ND[chunk], wide)
        if seen is not None:
            seen(torch.cat(losses))
        ctx.is_scaled = factor is not None
        ctx.save_for_backward(grad_hidden_ND, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype))
        return loss if factor is None else loss * factor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (scale,) = grads
        if ctx.is_scaled:
            return *ctx.saved_tensors, *[None] * 7
        return *(None if grad is None else _scaled(grad, scale) for grad in ctx.saved_tensors), *[None] * 7


def _product(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one if other is None else other if one is None else one * other


def _add_product(sum_VD: Tensor | None, grad_CV: Tensor, hidden_CD: Tensor, wide: torch.dtype) -> Tensor:
    """sum + grad^T hidden, in `wide` from the second chunk on."""
    if sum_VD is None:
        return grad_CV.T @ hidden_CD
    sum_VD = sum_VD.to(wide)
    if sum_VD.dtype == hidden_CD.dtype:
        return torch.addmm(sum_VD, grad_CV.T, hidden_CD, out=sum_VD)
    if adds_wide(hidden_CD.device.type, hidden_CD.dtype):
        return torch.addmm(sum_VD, grad_CV.T, hidden_CD, out_dtype=wide, out=sum_VD)
    return sum_VD.add_(grad_CV.T @ hidden_CD)


@cache
def adds_wide(device_type: str, dtype: torch.dtype) -> bool:
    """Whether torch has a product in `dtype` that adds to a sum in fp32 in place: tried once. (2.13: on CUDA alone.)"""
    ones = torch.ones(16, 16, dtype=dtype, device=device_type)
    total = torch.full((16, 16), 4097.0, device=device_type)  # bf16 has 4096 and 4128
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
        return bool((total == 4113).all())
    except (RuntimeError, TypeError):
        return False


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


def as_bits(numbers: Tensor) -> Tensor:
    """fp64 as int64 of the same bits: FSDP2 casts a model's floating inputs, and a weight in bf16 has three digits."""
    return numbers.double().view(torch.int64)


def factor_bits(count: Tensor, dtype: torch.dtype) -> Tensor:
    """1 / count as bits, in what a model that computes in `dtype` sums in."""
    if dtype == torch.float64:
        return count.double().reciprocal().view(torch.int64)
    count = count.float() if count.is_floating_point() else count  # reciprocals of integers are in fp32
    return count.reciprocal().view(torch.int32)


def head_loss(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    form: LossForm,
    per_row_B2: Tensor | None = None,
    by_row: bool = False,
    factor: Tensor | None = None,
    seen: Callable[[Tensor], None] | None = None,
    percent_BT: Tensor | None = None,
) -> Tensor:
    """The summed loss in nats, 0-dim, at least fp32; the same on every rank of `form.cut.group`. `per_row_B2`: a weight and an
    offset for each row, `as_bits`: the loss is then the sum over rows of weight x nats + offset. `by_row`: each row's nats, [B],
    without a gradient. `factor` (`factor_bits`): what all of it is multiplied by; backward must then begin with 1. `seen`: is
    called with the nats of each target, [N], before weights and factor. `percent_BT`: how much each target weighs, an integer;
    nothing together with `per_row_B2`."""
    hidden_ND, targets_N, weights_N = hidden_BTD.flatten(0, 1), targets_BT.flatten(), None
    if by_row:
        return _losses(hidden_ND, weight_VD, targets_N, form).view_as(targets_BT).sum(1)
    offsets_B = None
    if per_row_B2 is not None:
        weights_B, offsets_B = per_row_B2.view(torch.float64).unbind(1)
        weights_N = weights_B[:, None].expand_as(targets_BT).flatten()
    if percent_BT is not None:
        assert per_row_B2 is None, "rows of pairs have weights of their own"
        weights_N = percent_BT.flatten().to(_wide(hidden_BTD)) / 100
    # a frozen head needs no gradient of its own, and frozen blocks below it none of the hidden states
    keep = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden_BTD, weight_VD)]
    number = None if factor is None else factor.view(_wide(hidden_BTD))
    if number is not None and number.dim():  # a pipeline hands each micro-batch its own
        number = number[0]
    tokens = (hidden_ND, weight_VD, targets_N)
    loss: Tensor = _ChunkedCrossEntropy.apply(*tokens, form, *keep, weights_N, number, seen)
    if offsets_B is None:
        return loss
    offset = offsets_B.sum().to(loss.dtype)
    return loss + (offset if number is None else offset * number)


def _wide(hidden: Tensor) -> torch.dtype:
    """What softmax and sums run in: promote_types(dtype, float32), which would count as an operation."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


@torch.no_grad()
def _losses(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, form: LossForm) -> Tensor:
    """Each target's loss, [N]."""
    found = []
    for start in range(0, len(targets_N), form.chunk_tokens):
        chunk = slice(start, start + form.chunk_tokens)
        found.append(_loss_and_gradient(hidden_ND[chunk], weight_VD, targets_N[chunk], form, None, keep=False)[0])
    return torch.cat(found)
