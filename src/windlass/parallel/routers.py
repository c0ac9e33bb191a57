"""The routers of a program: what scales the gradient of their loss, and their figures over all ranks when a line is due.

The load-balancing loss joins in backward (model/routing.py), so it needs the factor of the program's own loss:
1 / (count over all ranks), times fp16's loss scale. The device adds up figures while a global batch runs, and sends them only on
request:

    sent per request (sparse layers x experts + 1) numbers of 8 bytes, summed over the loss axes and over the pipeline's stages
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from windlass.model.transformer import Decoder
from windlass.parallel.mesh import Mesh
from windlass.precision.loss_scale import LossScale


class Routers:
    """The routers in this rank's `parts` of the model. Does nothing for a model without experts."""

    def __init__(self, parts: Sequence[Decoder], mesh: Mesh):
        self._parts, self._mesh = parts, mesh
        self._is_sparse = bool(parts[0].arch.sparse_layers)
        self._count: torch.Tensor | None = None

    def begin(self, count: torch.Tensor, loss_scale: LossScale | None) -> None:
        """A global batch of `count` counted targets begins."""
        if not self._is_sparse:
            return
        self._count = count.double()
        scale = self._count.reciprocal()
        for part in self._parts:
            part.routing.begin(scale if loss_scale is None else scale * loss_scale.scale)

    def figures(self) -> dict[str, torch.Tensor]:
        """The routers' figures for the last global batch; empty without experts. Collective. `router_loss`: the load-balancing
        loss where it is trained on, mean over layers and sequences, 0-dim, as transformers' aux_loss; `expert_loads`: tokens of
        each layer's busiest expert over the mean of all, [sparse layers]: 1 is even, E / K the worst; `expert_shares`: the share
        of all layers' tokens that each expert gets, [E]."""
        if not self._is_sparse or self._count is None:
            return {}
        device = self._count.device
        loads_LE = torch.stack([part.routing.loads(device) for part in self._parts]).sum(0)
        loss = torch.stack([part.routing.loss(device) for part in self._parts]).sum()
        figures = torch.cat((loads_LE.double().flatten(), loss[None]))
        for group in (self._mesh.loss_group, self._mesh.pp_group):
            if group.size() > 1:
                dist.all_reduce(figures, group=group)
        loads_LE = figures[:-1].view(loads_LE.shape)
        router_loss = {"router_loss": figures[-1] / self._count} if self._parts[0].arch.router_loss else {}
        shares_E = loads_LE.sum(0) / loads_LE.sum()
        return router_loss | {"expert_loads": loads_LE.amax(1) / loads_LE.mean(1), "expert_shares": shares_E}
