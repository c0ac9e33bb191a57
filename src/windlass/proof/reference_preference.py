"""The oracle's preferences: their losses as the papers write them, with log_softmax, and autograd through all of it. Nothing of
ours."""

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Preferred:
    """Rows 2i and 2i + 1 are the chosen and the rejected answer of a pair; the loss is a mean over pairs that count something.
    The reference model is the one that training begins with, or its base."""

    loss: str
    beta: float
    smoothing: float
    target: float
    of_base: bool = True
    """Without the adapter's factors."""


def preferred(
    logits_BTV: torch.Tensor, began_BTV: torch.Tensor, targets_BT: torch.Tensor, how: Preferred
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of the pairs, summed, and how many pairs count something. `began_BTV`: the logits of the reference model."""

    def log_p(logits_BTV: torch.Tensor) -> torch.Tensor:
        found_BT = logits_BTV.log_softmax(-1).gather(-1, targets_BT.clamp(min=0)[..., None])[..., 0]
        return (found_BT * (targets_BT != -100)).sum(1)

    tokens_P2 = (targets_BT != -100).sum(1).view(-1, 2)
    ratio_P2 = (log_p(logits_BTV) - (0.0 if how.loss in ("simpo", "orpo") else log_p(began_BTV))).view(-1, 2)
    ratio_P2, tokens_P2 = ratio_P2[tokens_P2.all(1)], tokens_P2[tokens_P2.all(1)]
    margin_P = how.beta * (ratio_P2[:, 0] - ratio_P2[:, 1])
    each_P2 = ratio_P2 / tokens_P2
    mean_P, likely_P2 = each_P2[:, 0] - each_P2[:, 1], each_P2.exp()
    odds_P2 = likely_P2 / (1 - likely_P2)
    e, log_sigmoid = how.smoothing, functional.logsigmoid
    losses_P = {
        "sigmoid": lambda: -log_sigmoid(margin_P),
        "robust": lambda: (-(1 - e) * log_sigmoid(margin_P) + e * log_sigmoid(-margin_P)) / (1 - 2 * e),
        "hinge": lambda: torch.clamp(1 - margin_P, min=0),
        "ipo": lambda: (mean_P - 1 / (2 * how.beta)) ** 2,
        "simpo": lambda: -log_sigmoid(how.beta * mean_P - how.target),
        "orpo": lambda: -each_P2[:, 0] - how.beta * log_sigmoid((odds_P2[:, 0] / odds_P2[:, 1]).log()),
    }[how.loss]()
    return losses_P.sum(), torch.tensor(len(losses_P))
