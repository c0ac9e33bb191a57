"""The routers' load-balancing loss, per layer and sequence, so that no layout changes it; and how much work each expert gets.

For a sequence of n counted tokens and one layer (arXiv 2101.03961, equations 4 to 6, for K experts per token):

    f_e = (tokens sent to e) / n        p_e = (sum of their probabilities of e) / n        loss = E sum_e f_e p_e

which is K where all experts get equally many tokens. A step trains on the loss of its tokens plus `router_aux_loss_coef` times
the mean of this over the sparse layers and, weighted by their counted tokens, over the sequences:

    (sum of nats + coef / L sum_layers sum_sequences n loss) / (counted tokens of the global batch)

transformers joins all layers and all rows of a batch before it multiplies f and p, so its value depends on the micro-batch; on
one layer and one sequence the two are equal. Tokens that are not counted (targets of -100: prompts, padding) do not count here.

f has no gradient, so the loss is linear in the probabilities: ranks that share a sequence (`context`) add up counts, and each
differentiates its own tokens' part. The loss is not in the model's output. It joins in backward: `attach` adds its gradient when
the hidden states' gradient passes, which works on every pipeline stage. `scale` is the factor of the program's own loss; ranks
that compute the same routing (`tp`) each take an equal part of it.

Legend: B sequences, E experts, L sparse layers of the whole model (`layers`: the positions among them of those on this rank).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from windlass.model.architecture import Architecture
from windlass.model.moe import Routed


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return hidden.clone()  # no view: FSDP2 warns of units that return one

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (scale,) = ctx.saved_tensors
        return grads[0], scale, None


class Routing:
    """Loads and losses of the sparse layers of one Decoder, added up over the micro-batches of a global batch."""

    def __init__(self, arch: Architecture, layers: Sequence[int]):
        self._arch, self._num_layers = arch, len(arch.sparse_layers)
        self.num_layers_here = len(layers)
        self._indices = [arch.sparse_layers.index(layer) for layer in layers]
        self.scale: Tensor | None = None
        """The program multiplies a summed loss by this before backward, 0-dim; None: 1."""
        self.num_sharing = 1
        """Ranks that compute the same routing."""
        self.sum_counts: Callable[[Tensor], Tensor] | None = None
        """Adds up over the ranks that share each sequence; None: no ranks do."""
        self._routed: list[Routed] = []  # of the micro-batch that is under way
        self._loads_LE: Tensor | None = None
        self._loss: Tensor | None = None

    def begin(self, scale: Tensor) -> None:
        """A global batch begins."""
        self.scale, self._loads_LE, self._loss = scale, None, None

    def collect(self, hidden_BTD: Tensor, routed: Routed) -> Tensor:
        """A sparse layer's output -> its hidden states; keeps the rest until `join`."""
        self._routed.append(routed)
        return hidden_BTD

    def join(self, hidden_BTD: Tensor, is_training: bool = True) -> Tensor:
        """After the layers of one micro-batch: records their loads, and attaches their loss to the hidden states."""
        routed, self._routed = self._routed, []
        if not routed or not is_training:
            return hidden_BTD
        counts_LBE = torch.stack([counts_BE for counts_BE, _ in routed])
        mass_LBE = torch.stack([mass_BE for _, mass_BE in routed])
        self._note_loads(counts_LBE)
        if not self._arch.router_loss:
            return hidden_BTD
        if self.sum_counts is not None:
            counts_LBE = self.sum_counts(counts_LBE)
        num_LB = counts_LBE.sum(-1) // self._arch.experts_per_token  # counted tokens of each sequence
        loss = (counts_LBE * mass_LBE / num_LB.clamp(min=1)[:, :, None]).sum() * (
            self._arch.num_experts / self._num_layers
        )
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        scale = loss.new_ones(()) if self.scale is None else self.scale.to(loss.dtype)
        factor = self._arch.router_loss_scale / self.num_sharing
        joined: Tensor = _Attach.apply(hidden_BTD, loss, scale * factor)
        return joined

    def _note_loads(self, counts_LBE: Tensor) -> None:
        loads_LE = counts_LBE.sum(1)
        self._loads_LE = loads_LE if self._loads_LE is None else self._loads_LE + loads_LE

    def loads(self, device: torch.device) -> Tensor:
        """[sparse layers of the whole model, E]: this rank's counted tokens by expert; 0 for layers that are elsewhere."""
        whole = torch.zeros(self._num_layers, self._arch.num_experts, dtype=torch.int64, device=device)
        if self._loads_LE is not None:
            whole[self._indices] = self._loads_LE
        return whole

    def loss(self, device: torch.device) -> Tensor:
        """This rank's part of (1/L) sum over layers and sequences of n loss, 0-dim in fp64."""
        return torch.zeros((), dtype=torch.float64, device=device) if self._loss is None else self._loss.double()
