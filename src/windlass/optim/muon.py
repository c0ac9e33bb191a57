"""Muon: every hidden matrix moves by an orthogonal matrix, whatever the lengths of its gradient's directions; AdamW for the rest.

    M <- b M + (1-b) G     U = (1-b) G + b M  (nesterov)     O = NS(U) ~ U (U^T U)^-1/2     W <- (1 - lr decay) W - lr s O

NS is `steps` rounds of X <- a X + (b X X^T + c (X X^T)^2) X on X = U / |U|, whose coefficients pull the singular values to
about 1 (0.7 to 1.2, which is near enough). s = 0.2 sqrt(max(rows, columns)) gives O the size of an AdamW update, so one learning
rate and one decay serve both. Hidden matrices are those of the blocks; embeddings, positions, head, norms and biases follow
AdamW. GPT-2's fused query, key and value are three matrices here, as in memory.

Layout. NS needs the whole matrix. With S shards over `fsdp` and each matrix cut over T tensor ranks first (tensor.py), matrices
are dealt out, one per rank in rounds of S T. Each rank sends its rows of matrix j to the shard rank that owns j, which then has a
tensor rank's part of j. Those parts go over `tp` to the rank that computes O, and O returns by the same two steps (four
all-to-alls per S T matrices, two where S or T is 1). P: elements of the hidden matrices, r x c: one of them, r <= c.

    kept per rank    the momentum, cut as the parameter (AdamW keeps two such moments)
    sent per rank    2 b (P/ST) ((S-1)/S + (T-1)/T) bytes per step, b bytes per element of the compute dtype: little beside ZeRO's
                     gathers
    FLOPs            steps (4 r^2 c + 2 r^3) per matrix: 5 r / N of training's where r = c, at N tokens per step. Replicas (DDP,
                     HSDP) each compute the same: sending the results instead would cost b P bytes per step

NS runs in the dtype of the policy's matrix products (bf16, as in the original; fp64, so that layouts can be proved equal), but
under fp16 in fp32: much of a clipped gradient is zero in fp16. A non-finite norm changes nothing; no host reads a number.

Sources: Jordan et al., kellerjordan.github.io/posts/muon (2024), torch.optim.Muon (whole 2-D tensors only, always bf16);
s and the decay: Moonlight, arXiv 2502.16982.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from windlass.optim.adamw import AdamW
from windlass.optim.clip import clip_divisor
from windlass.optim.config import OptimConfig
from windlass.optim.groups import Parameter, parameter_groups, set_learning_rate, write_copies
from windlass.optim.rules import Rules
from windlass.ranks.owned_part import local_tensor

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)  # Jordan's quintic, torch's default
MATCH_ADAMW: Final = 0.2  # the usual RMS of an AdamW update, arXiv 2502.16982, section 2.2


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """The orthogonal factor of a [rows, columns] matrix, about, in its dtype."""
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Muon:
    """Over trainable hidden matrices; `rest` steps the other parameters. `compute`: the dtype of NS."""

    def __init__(
        self, hidden: Sequence[Parameter], config: OptimConfig, rules: Rules, compute: torch.dtype, rest: AdamW | None
    ):
        self._hidden, self._settings, self._rest = list(hidden), config.muon, rest
        self._max_norm = config.max_norm
        self._compute = torch.float32 if compute == torch.float16 else compute
        self._groups = parameter_groups(hidden, config, rules)
        for group in self._groups:  # matrices of one shape are dealt together, so that no rank waits for a larger one
            group["params"].sort(key=lambda parameter: (_cut(parameter).sizes, tuple(parameter.shape)))
        self._made: dict[Tensor, Tensor] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._groups + (self._rest.param_groups if self._rest else [])

    def set_learning_rate(self, rate: float) -> None:
        set_learning_rate(self._groups, rate)
        if self._rest:
            self._rest.set_learning_rate(rate)

    @torch.no_grad()
    def step(self, norm: Tensor) -> None:
        """One update by the gradients, clipped, or none where `norm` is not finite. Then drops the gradients."""
        if self._rest:
            self._rest.step(norm)
        is_finite, divisor = torch.isfinite(norm), clip_divisor(norm, self._max_norm)
        taken = is_finite.double()
        for group in self._groups:
            rate = group["lr"]
            for dealt in _rounds(group["params"]):
                for parameter, update in zip(dealt, self._orthogonal(dealt, is_finite, divisor)):
                    local = local_tensor(parameter)
                    size = rate * MATCH_ADAMW * max(parameter.shape) ** 0.5
                    local.mul_(1 - taken * (rate * group["weight_decay"]))
                    local.sub_(update.to(local.dtype).mul_(taken * size))
                    parameter.grad = None
        write_copies(self._hidden)

    def _orthogonal(self, dealt: Sequence[Tensor], is_finite: Tensor, divisor: Tensor) -> list[Tensor]:
        """This rank's part of the orthogonalised update of each of at most S T matrices: matrix j is computed by the rank at
        (j // T, j % T) of (fsdp, tp)."""
        updates = [self._update(parameter, is_finite, divisor) for parameter in dealt]
        cut = _cut(dealt[0])
        (num_shards, num_parts), (shard, part) = cut.sizes, cut.coordinates
        shapes = [_part_shape(parameter, num_parts) for parameter in dealt]  # of a tensor rank's part
        rounds = [range(s * num_parts, min((s + 1) * num_parts, len(dealt))) for s in range(num_shards)]
        mine = rounds[shard]  # this rank computes one of them, if the round has one for it
        own = mine[part] if part < len(mine) else None

        # rows of each matrix to the shard rank it is dealt to, and a tensor rank's part of it to the rank that computes
        rows = [_rows(shape[0], num_shards) for shape in shapes]
        got = _exchange(
            [[updates[j] for j in dealt_there] for dealt_there in rounds],
            [[(rows[j][s], shapes[j][1]) for j in mine] for s in range(num_shards)],
            cut.groups[0],
            updates[0],
        )
        parts = [torch.cat([from_shard[k] for from_shard in got]) for k in range(len(mine))]
        per_part = [[parts[t]] if t < len(mine) else [] for t in range(num_parts)]
        at = [shapes[own]] if own is not None else []
        got = _exchange(per_part, [at] * num_parts, cut.groups[1], updates[0])
        done: list[list[Tensor]] = [[] for _ in range(num_parts)]
        if own is not None:
            dim = _part_dim(dealt[own])
            whole = newton_schulz(torch.cat([one for (one,) in got], dim), self._settings.steps)
            done = [[one] for one in whole.chunk(num_parts, dim)]

        # and back the same two ways
        got = _exchange(done, [[shapes[j]] for j in mine] + [[]] * (num_parts - len(mine)), cut.groups[1], updates[0])
        parts = [one for from_part in got for one in from_part]
        back = [[one.split(rows[j])[s] for j, one in zip(mine, parts)] for s in range(num_shards)]
        here = [[(rows[j][shard], shapes[j][1]) for j in dealt_there] for dealt_there in rounds]
        return [one for from_shard in _exchange(back, here, cut.groups[0], updates[0]) for one in from_shard]

    def _update(self, parameter: Tensor, is_finite: Tensor, divisor: Tensor) -> Tensor:
        """Updates the momentum; -> the input of NS: this rank's rows, in the compute dtype."""
        assert parameter.grad is not None, (
            "the check after the first step has seen a gradient of every trainable parameter"
        )
        momentum, beta = local_tensor(self._momentum(parameter)), self._settings.momentum
        gradient = torch.where(is_finite, local_tensor(parameter.grad) / divisor, 0)
        momentum.lerp_(gradient, (1 - beta) * is_finite.to(momentum.dtype))
        return (gradient.lerp(momentum, beta) if self._settings.nesterov else momentum).to(self._compute)

    def lost_shares(self) -> dict[str, float]:
        return self._rest.lost_shares() if self._rest else {}

    def state_tensors(self, is_blank: bool = False) -> dict[str, Tensor]:
        """`<name>.momentum` of every counted hidden matrix, and the state of the rest. `is_blank`: see AdamW's."""
        counted = [record for record in self._hidden if record.counted]  # a restore writes no other
        own = {f"{record.name}.momentum": self._momentum(record.tensor, is_blank) for record in counted}
        return own | (self._rest.state_tensors(is_blank) if self._rest else {})

    def _momentum(self, parameter: Tensor, is_blank: bool = False) -> Tensor:
        if parameter not in self._made:
            self._made[parameter] = torch.empty_like(parameter) if is_blank else torch.zeros_like(parameter)
        return self._made[parameter]


class _Cut(NamedTuple):
    """Over how many ranks of (fsdp, tp) a matrix is cut, this rank's coordinates, and the groups; None for one rank."""

    sizes: tuple[int, int]
    coordinates: tuple[int, int]
    groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]


def _cut(parameter: Tensor) -> _Cut:
    if not isinstance(parameter, DTensor):
        return _Cut((1, 1), (0, 0), (None, None))
    mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names or ()
    for name, placement in zip(names, parameter.placements, strict=True):
        known = placement.is_replicate() or name in ("fsdp", "tp")
        assert known and (name != "fsdp" or placement.dim == 0), f"Muon knows shards of rows, not {parameter}"  # type: ignore[attr-defined]
    axes = [names.index(name) if name in names else None for name in ("fsdp", "tp")]
    if axes[1] is not None and parameter.placements[axes[1]].is_replicate():
        axes[1] = None  # a router, which every tensor rank holds: each computes what its shard rank is dealt
    sizes = [1 if axis is None else mesh.size(axis) for axis in axes]
    coordinates = [0 if axis is None else mesh.get_local_rank(axis) for axis in axes]
    groups = [None if axis is None or size == 1 else mesh.get_group(axis) for axis, size in zip(axes, sizes)]
    return _Cut((sizes[0], sizes[1]), (coordinates[0], coordinates[1]), (groups[0], groups[1]))


def _rounds(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of matrices, each as large as the number of ranks that share one of them; `parameters` are sorted by that."""
    for sizes, alike in groupby(parameters, key=lambda parameter: _cut(parameter).sizes):
        rest, at_once = list(alike), math.prod(sizes)
        yield from (rest[start : start + at_once] for start in range(0, len(rest), at_once))


def _part_dim(parameter: Tensor) -> int:
    """The dim that `tp` cuts; 0 where it cuts none."""
    if not isinstance(parameter, DTensor) or "tp" not in (names := parameter.device_mesh.mesh_dim_names or ()):
        return 0
    placement = parameter.placements[names.index("tp")]
    return placement.dim if isinstance(placement, Shard) else 0


def _part_shape(parameter: Tensor, num_parts: int) -> tuple[int, int]:
    sizes = list(parameter.shape)
    sizes[_part_dim(parameter)] //= num_parts
    return sizes[0], sizes[1]


def _exchange(
    outgoing: list[list[Tensor]], incoming: list[list[tuple[int, int]]], group: dist.ProcessGroup | None, like: Tensor
) -> list[list[Tensor]]:
    """All-to-all of lists of matrices: outgoing[r] go to rank r of `group`; incoming[r] are the shapes that come from it. `like`:
    a tensor of their dtype and device."""
    if group is None:
        return outgoing
    sent = [sum(one.numel() for one in to) for to in outgoing]
    coming = [sum(rows * columns for rows, columns in shapes) for shapes in incoming]
    flat = torch.cat([one.flatten() for to in outgoing for one in to] or [like.new_empty(0)])
    got = flat.new_empty(sum(coming))
    dist.all_to_all_single(got, flat, coming, sent, group)
    return [
        [piece.view(shape) for piece, shape in zip(part.split([r * c for r, c in shapes]), shapes)]
        for part, shapes in zip(got.split(coming), incoming)
    ]


def _rows(count: int, num_ranks: int) -> list[int]:
    """How FSDP2 cuts `count` rows (torch.chunk): equal parts, the last with rows smaller, then empty ones."""
    most = -(-count // num_ranks)
    return [min(max(count - rank * most, 0), most) for rank in range(num_ranks)]
