"""The oracle's routers: their load-balancing loss and the load of the experts, from transformers' router logits. Nothing
of ours."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional


def balance(router_logits: Sequence[torch.Tensor], counted_BT: torch.Tensor, config: Any) -> torch.Tensor:
    """The load-balancing loss of each layer and sequence, E sum_e f_e p_e over its counted tokens, times their number: the sum
    over sequences and mean over layers."""
    total = torch.zeros((), dtype=router_logits[0].dtype)
    for logits_NE in router_logits:
        for logits_TE, counted_T in zip(logits_NE.unflatten(0, counted_BT.shape), counted_BT, strict=True):
            if not counted_T.any():
                continue
            p_TE = logits_TE[counted_T].softmax(-1)
            chosen_TE = functional.one_hot(p_TE.topk(config.num_experts_per_tok).indices, p_TE.shape[1]).sum(1)
            loss = p_TE.shape[1] * (chosen_TE.to(p_TE.dtype).mean(0) * p_TE.mean(0)).sum()
            total = total + loss * len(p_TE)
    return total / len(router_logits)


def loads(router_logits: Sequence[torch.Tensor], counted_BT: torch.Tensor, num_chosen: int) -> dict[str, torch.Tensor]:
    """`expert_loads`, [sparse layers]: how many counted tokens the busiest expert gets, over the mean of all experts;
    `expert_shares`, [E]: what each expert gets of all layers' tokens."""
    found, total_E = [], torch.zeros(router_logits[0].shape[1], dtype=torch.float64)
    for logits_NE in router_logits:
        chosen = logits_NE[counted_BT.flatten()].topk(num_chosen).indices.flatten()
        tokens_E = torch.bincount(chosen, minlength=logits_NE.shape[1]).double()
        found.append(tokens_E.max() / tokens_E.mean())
        total_E += tokens_E
    return {"expert_loads": torch.stack(found), "expert_shares": total_E / total_E.sum()}
