"""Preferences: of two answers to one prompt the chosen one becomes more likely than the rejected one. DPO and its relatives.

Rows 2i and 2i + 1 of a batch are the chosen and the rejected answer of pair i, behind their prompt, of which nothing counts. For
a pair, with p the model's and q the reference's probability of an answer (all its tokens), n their number, s the sigmoid, and
the settings beta, gamma (target_margin) and e (label_smoothing):

    d = beta ((log p - log q)(chosen) - (log p - log q)(rejected))        the margin of rewards
    sigmoid   -log s(d)                                                     Rafailov et al., arXiv 2305.18290
    robust    (-(1 - e) log s(d) + e log s(-d)) / (1 - 2e)                  Chowdhury et al., arXiv 2403.00409
    hinge     max(0, 1 - d)                                                 Zhao et al., arXiv 2309.06657
    ipo       (m - 1 / (2 beta))^2, m as d / beta, of means per token       Azar et al., arXiv 2310.12036
    simpo     -log s(beta (log p / n)(chosen) - beta (log p / n)(rejected) - gamma)      Meng et al., arXiv 2405.14734
    orpo      -a(chosen) - beta log s(h(chosen) - h(rejected))              Hong et al., arXiv 2403.07691
              with a = log p / n and the log-odds h = a - log(1 - exp(a))

**One loop, one program.** Layouts compute sums of nats per row and nothing else, so the loss is given to them as its tangent at
the current weights. `program.score` reads log p of each row without a gradient; here the loss f of a pair is differentiated by
these two numbers; and the batch goes to `program.run` with a weight and an offset per row,

    sum over rows of (w nats + o),    w = -df/d(log p),    o such that the value is f

whose value is the true loss and whose gradient is the true gradient. The price is one forward without a backward per step.

**The reference** is the model that the run began with. Where an adapter began with B = 0, that is the base: the factors are left
out of one more forward. Else its scores of all pairs are computed once before step 0 and read with each pair (kept_scores.py).
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from windlass.data.batch_fields import NOT_COUNTED, Batch
from windlass.model.head.loss import as_bits
from windlass.objectives.config import ObjectiveConfig
from windlass.parallel.program import Program

REFERENCE: Final = "reference"
"""The key of a batch's kept scores, [rows] in fp64: log q of each answer."""
SURE: Final = -1e-12  # a mean log p of an answer that is certain: its odds would be infinite
Losses = Callable[[Tensor, Tensor, Tensor, ObjectiveConfig], Tensor]


def _sigmoid(margin_P: Tensor, _means_P2: Tensor, _beta: Tensor, _config: ObjectiveConfig) -> Tensor:
    return -logsigmoid(margin_P)


def _robust(margin_P: Tensor, _means_P2: Tensor, _beta: Tensor, config: ObjectiveConfig) -> Tensor:
    wrong = config.label_smoothing or 0.0
    return (wrong * logsigmoid(-margin_P) - (1 - wrong) * logsigmoid(margin_P)) / (1 - 2 * wrong)


def _hinge(margin_P: Tensor, _means_P2: Tensor, _beta: Tensor, _config: ObjectiveConfig) -> Tensor:
    return (1 - margin_P).relu()


def _ipo(_margin_P: Tensor, means_P2: Tensor, beta: Tensor, _config: ObjectiveConfig) -> Tensor:
    return (means_P2[:, 0] - means_P2[:, 1] - 1 / (2 * beta)).square()


def _simpo(_margin_P: Tensor, means_P2: Tensor, beta: Tensor, config: ObjectiveConfig) -> Tensor:
    return -logsigmoid(beta * (means_P2[:, 0] - means_P2[:, 1]) - config.preference_margin)


def _orpo(_margin_P: Tensor, means_P2: Tensor, beta: Tensor, _config: ObjectiveConfig) -> Tensor:
    means_P2 = means_P2.clamp(max=SURE)
    odds_P2 = means_P2 - (-means_P2.expm1()).log()
    return -means_P2[:, 0] - beta * logsigmoid(odds_P2[:, 0] - odds_P2[:, 1])


LOSSES: Final[dict[str, Losses]] = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
    "simpo": _simpo,
    "orpo": _orpo,
}


def pair_losses(log_p_P2: Tensor, log_q_P2: Tensor, tokens_P2: Tensor, config: ObjectiveConfig) -> Tensor:
    """The loss of each pair, [P]. `log_p_P2`, `log_q_P2`: of chosen and rejected under model and reference (0 without one);
    `tokens_P2`: counted ones."""
    beta = log_p_P2.new_tensor(config.preference_beta)
    ratios_P2 = log_p_P2 - log_q_P2
    means_P2 = ratios_P2 / tokens_P2.clamp(min=1)
    margin_P = beta * (ratios_P2[:, 0] - ratios_P2[:, 1])
    return LOSSES[config.preference_loss](margin_P, means_P2, beta, config)


class Preference:
    def __init__(self, config: ObjectiveConfig):
        self._config = config
        self._sums: Tensor | None = None
        self._program: Program | None = None

    def weigh(self, batches: list[Batch], program: Program) -> tuple[list[Batch], Tensor]:
        """-> the batches with `per_row`, weight and offset of each row, and the number of pairs over all ranks. A pair whose rows
        count no target (padding of a validation set, a shard that was left out) is none."""
        kept = [batch[REFERENCE] for batch in batches if REFERENCE in batch]
        batches = [{name: tensor for name, tensor in batch.items() if name != REFERENCE} for batch in batches]
        tokens_P2 = torch.cat([(batch["targets"] != NOT_COUNTED).sum(1) for batch in batches]).double().view(-1, 2)
        log_p_P2 = program.score(batches).double().view(-1, 2)
        log_q_P2 = self._reference(kept, batches, program).view(-1, 2)
        is_pair_P = (tokens_P2 > 0).all(1)
        with torch.enable_grad():
            log_p_P2.requires_grad_()
            losses_P = pair_losses(log_p_P2, log_q_P2, tokens_P2, self._config).where(is_pair_P, 0)
            (slopes_P2,) = torch.autograd.grad(losses_P.sum(), log_p_P2)
        log_p_P2, losses_P, weights_P2 = log_p_P2.detach(), losses_P.detach(), -slopes_P2
        offsets_P = losses_P + (weights_P2 * log_p_P2).sum(1)
        offsets_P2 = torch.stack((offsets_P, torch.zeros_like(offsets_P)), 1)
        per_row_B2 = as_bits(torch.stack((weights_P2.flatten(), offsets_P2.flatten()), 1))
        self._note(log_p_P2, log_q_P2, tokens_P2, is_pair_P, program)
        parts = per_row_B2.split([len(batch["input_ids"]) for batch in batches])
        weighed = [{**batch, "per_row": part_B2} for batch, part_B2 in zip(batches, parts, strict=True)]
        return weighed, program.mesh.sum_over_batch(is_pair_P.sum())

    def figures(self) -> dict[str, Tensor]:
        """Means over the pairs of the last batches: `reward_chosen` and `reward_rejected`, beta (log p - log q); `margin`, their
        difference; `accuracy`, the share of pairs with a margin above 0. A loss without a reference has rewards
        beta log p / n."""
        if self._sums is None or self._program is None:
            return {}
        *sums, pairs = self._program.mesh.sum_over_batch(self._sums.clone()).unbind()
        names = ("reward_chosen", "reward_rejected", "margin", "accuracy")
        return {name: total / pairs for name, total in zip(names, sums, strict=True)}

    def _reference(self, kept: list[Tensor], batches: list[Batch], program: Program) -> Tensor:
        """log q of each row; 0 where the loss has no reference."""
        if not self._config.has_reference:
            return torch.cat([batch["targets"].new_zeros(len(batch["targets"])) for batch in batches]).double()
        return torch.cat(kept) if kept else program.score(batches, adapted=False).double()

    def _note(self, log_p_P2: Tensor, log_q_P2: Tensor, tokens_P2: Tensor, is_pair_P: Tensor, program: Program) -> None:
        divisors_P2 = torch.ones_like(tokens_P2) if self._config.has_reference else tokens_P2.clamp(min=1)
        rewards_P2 = self._config.preference_beta * (log_p_P2 - log_q_P2) / divisors_P2
        margin_P = rewards_P2[:, 0] - rewards_P2[:, 1]
        noted_P5 = torch.stack((*rewards_P2.unbind(1), margin_P, (margin_P > 0).double(), torch.ones_like(margin_P)), 1)
        self._sums, self._program = noted_P5.where(is_pair_P[:, None], 0).sum(0), program
