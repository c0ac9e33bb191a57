"""What mixtures of experts allow of a layout and of a recipe. No torch: recipes are checked before it is imported.

`expert` deals the experts of each sparse layer out over ranks that share parameters (shard x context), in equal numbers.
"""

from collections.abc import Iterator

from windlass.errors import UserError
from windlass.model.architecture import Architecture, divisors
from windlass.parallel.config import ParallelConfig


def expert_errors(expert: int, zero: int) -> Iterator[UserError]:
    """Settings that `parallel.expert` does not work with."""
    if expert > 1 and zero == 0:
        yield UserError(
            f"parallel.zero=0 with parallel.expert={expert}",
            "zero 0 is DDP, which sums all gradients over all ranks; with expert each rank holds its own experts",
            "use parallel.zero=1 or 2, or 3 where parallel.pp is 1",
        )


def expert_rank_errors(expert: int, shard: int, context: int) -> Iterator[UserError]:
    """Where `expert` does not divide the ranks that share parameters."""
    ranks = shard * context
    if ranks % expert:
        beside = f" and parallel.context={context}" * (context > 1)
        yield UserError(
            f"parallel.expert={expert} with parallel.shard={shard}{beside}",
            f"experts are dealt out over ranks that share parameters: expert divides shard x context = {ranks}",
            f"use parallel.expert={' or '.join(map(str, divisors(ranks)))}",
        )


def model_expert_errors(
    architecture: Architecture, parallel: ParallelConfig, optimizer: str | None
) -> Iterator[UserError]:
    """Settings that a model's experts forbid, or that it has none. `optimizer` None: not known."""
    expert, activation_gib = parallel.expert, parallel.activation_gib
    experts = architecture.num_experts if architecture.sparse_layers else 0
    if expert > 1 and not experts:
        yield UserError(
            f"parallel.expert={expert} for a model of family {architecture.family} without experts",
            "expert deals out the experts of sparse layers",
            "remove parallel.expert",
        )
    if not experts:
        return
    if experts % expert:
        yield UserError(
            f"parallel.expert={expert} for a model of {experts} experts",
            "each of expert ranks holds an equal number of experts",
            f"use parallel.expert={' or '.join(map(str, divisors(experts)))}",
        )
    if optimizer == "muon":
        yield UserError(
            "optim.kind=muon for a model with experts",
            "Muon is not shown to be right for matrices of experts, which hold most of such a model",
            "use optim.kind=adamw",
        )
    if activation_gib is not None:
        yield UserError(
            f"parallel.activation_gib={activation_gib} for a model with experts",
            "what a sparse layer keeps is not counted beforehand: over ranks it depends on where the router sends the tokens",
            "remove parallel.activation_gib, and choose parallel.recompute=none, selective or full",
        )
