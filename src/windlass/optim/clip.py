"""Clip by the global norm: one number for the whole model, however it is cut.

    norm = sqrt(sum over all parameters, all shards, of g^2)          g <- g min(1, max_norm / (norm + 1e-6))

After program.run the gradients are sums over all ranks, in the parameter's layout: a shard's own square belongs to the sum
once. DTensor knows which axes cut and which repeat, so its norm is summed over `fsdp` and not over `replicate`; plain
gradients are whole on every rank. A norm per rank would scale the shards of one tensor differently (seen in the field: 0.11
and 0.41 where 0.43 is true). Parameters of different meshes cannot share a foreach call: norms are taken per mesh.

Sent: one all-reduce of 4 bytes over `fsdp`, and one over the pipeline stages where there are several. Source: Pascanu et al., arXiv 1211.5063.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s, so that one process with torch's own clip gives the same numbers


class Parameter(Protocol):
    @property
    def tensor(self) -> torch.nn.Parameter: ...
    @property
    def counted(self) -> bool: ...


def clip_gradients(records: Sequence[Parameter], max_norm: float, parts: dist.ProcessGroup) -> torch.Tensor:
    """Scales every gradient in place; -> the global norm before scaling, 0-dim, equal on every rank. Reads nothing on the
    host. A non-finite norm leaves non-finite gradients: the optimizer skips that step.

    `parts`: the ranks that hold other parameters (pipeline stages); over it squares are summed, unless it is one rank.
    """
    by_mesh: dict[object, list[torch.Tensor]] = {}
    gradients = []
    for record in records:
        gradient = record.tensor.grad
        if gradient is None:
            continue
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        gradients.append(local)
        if record.counted:
            mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
            by_mesh.setdefault(mesh, []).append(gradient)
    norms = [_norm(group) for group in by_mesh.values()]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if parts.size() > 1:
        square = norm.square()
        dist.all_reduce(square, group=parts)
        norm = square.sqrt()
    torch._foreach_mul_(gradients, (max_norm / (norm + EPSILON)).clamp_(max=1.0))
    return norm


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
