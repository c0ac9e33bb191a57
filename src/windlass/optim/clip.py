"""Clip by the global norm: one number for the whole model, however it is cut.

    norm = sqrt(sum over all parameters, all shards, of g^2)          g <- g / max(1, (norm + 1e-6) / max_norm)

After program.run the gradients are sums over all ranks, in the parameter's layout, so each shard's square enters the sum
once. DTensor knows which axes cut and which repeat, so its norm is summed over `fsdp` and not over `replicate`; plain
gradients are whole on every rank. A norm per rank would scale the shards of one tensor differently (seen in the field: 0.11
and 0.41 where 0.43 is true). Parameters of different meshes cannot share a foreach call: norms are taken per mesh.

Who divides: the optimizer, in the pass of its update. A pass of its own would read and write every gradient once more, 8 bytes
per parameter in fp32.

Sent, where there are several ranks: an all-reduce over `fsdp` and one over `tp`, of 4 bytes per tensor; 4 bytes over the stages.
Source: Pascanu et al., arXiv 1211.5063.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from windlass.ranks.owned_part import local_tensor

EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s, so that one process with torch's own clip gives the same numbers

_MESH: Final = attrgetter("_spec.mesh")


class ClippedParameter(Protocol):
    @property
    def tensor(self) -> torch.nn.Parameter: ...
    @property
    def counted(self) -> bool: ...


def gradient_norm(records: Sequence[ClippedParameter], pp_group: dist.ProcessGroup) -> torch.Tensor:
    """-> the global norm of the gradients, 0-dim, equal on every rank. Reads nothing on the host, and changes nothing.

    `pp_group`: the ranks that hold other parameters (pipeline stages); squares are summed over it, unless it is one rank.
    """
    counted = [gradient for record in records if record.counted and (gradient := record.tensor.grad) is not None]
    norms = [_norm(group) for group in _by_mesh(counted) if group]
    if not norms:  # a pipeline's rank whose parameters are all frozen
        stored = records[0].tensor
        norms = [torch.zeros((), dtype=torch.promote_types(stored.dtype, torch.float32), device=stored.device)]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if pp_group.size() > 1:
        square = norm.square()
        dist.all_reduce(square, group=pp_group)
        norm = square.sqrt()
    return norm


def clip_divisor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients of the global norm `norm` are divided by, 0-dim, at least 1.0. Of no use where the norm is not finite: the
    optimizer skips that step."""
    return norm.add(EPSILON).div_(max_norm).clamp_(min=1.0)


def divide_gradients(parameters: Sequence[torch.Tensor], divisor: torch.Tensor) -> None:
    """In place, in a pass of its own: for updates that cannot take the divisor."""
    gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
    if gradients:
        torch._foreach_div_(_local(gradients), divisor)


def _by_mesh(gradients: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    if not _has_shards(gradients) or _has_one_mesh(gradients):
        return [gradients]
    groups: dict[object, list[torch.Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        groups.setdefault(mesh, []).append(gradient)
    return list(groups.values())


def _local(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    if not _has_shards(gradients):
        return gradients
    return [local_tensor(gradient) for gradient in gradients]


def _has_shards(gradients: list[torch.Tensor]) -> bool:
    """One call for the whole model; asking each gradient would take a call per parameter and step."""
    return DTensor in set(map(type, gradients))


def _has_one_mesh(gradients: list[torch.Tensor]) -> bool:
    """Whether all are DTensors of one mesh, found without a call per parameter: `device_mesh` is a property in Python."""
    return set(map(type, gradients)) == {DTensor} and len(set(map(id, map(_MESH, gradients)))) == 1


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    if gradients[0].dtype == torch.bfloat16:  # torch's own norm of bf16 gradients is a bf16 number: three digits
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0, dtype=torch.float32)))
    else:
        norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
