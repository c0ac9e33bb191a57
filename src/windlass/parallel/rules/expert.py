"""What mixtures of experts allow of a layout and of a recipe. No torch: recipes are checked before it is imported.

`expert` deals the experts of each sparse layer out over ranks that share parameters (shard x context), in equal numbers.
"""

from windlass.errors import UserError
from windlass.model.architecture import Architecture, divisors


def check_expert(expert: int, zero: int, compile: bool, recompute: str) -> None:
    """What `parallel.expert` cannot be beside. Raises UserError."""
    if expert == 1:
        return
    if zero == 0:
        raise UserError(
            f"parallel.zero=0 with parallel.expert={expert}",
            "zero 0 is DDP, which sums all gradients over all ranks; experts that are dealt out have owners",
            "use parallel.zero=1, 2 or 3",
        )
    if recompute == "selective":
        raise UserError(
            f"parallel.recompute=selective with parallel.expert={expert}",
            "experts that are dealt out are a unit of FSDP2 inside their block, and torch's selective recomputation fails at one",
            "use parallel.recompute=full or none",
        )
    if compile:
        raise UserError(
            f"parallel.compile=true with parallel.expert={expert}",
            "how many rows go to which rank is read by the host in every sparse layer, and a compiled block reads nothing",
            "use parallel.compile=false, or parallel.expert=1: experts then are cut by shard like all else",
        )


def check_expert_ranks(expert: int, shard: int, context: int) -> None:
    """Raises UserError where `expert` does not divide the ranks that share parameters."""
    ranks = shard * context
    if ranks % expert:
        beside = f" and parallel.context={context}" * (context > 1)
        raise UserError(
            f"parallel.expert={expert} with parallel.shard={shard}{beside}",
            f"experts are dealt out over ranks that share parameters: expert divides shard x context = {ranks}",
            f"use parallel.expert={' or '.join(map(str, divisors(ranks)))}",
        )


def check_experts(
    architecture: Architecture,
    expert: int,
    tp: int,
    compile: bool,
    policy: str,
    optimizer: str,
    activation_gib: float | None,
) -> None:
    """Raises UserError where a model's experts, or that it has none, forbid a setting."""
    experts = architecture.num_experts if architecture.sparse_layers else 0
    if expert > 1 and not experts:
        raise UserError(
            f"parallel.expert={expert} for a model of family {architecture.family} without experts",
            "expert deals out the experts of sparse layers",
            "remove parallel.expert",
        )
    if not experts:
        return
    if experts % expert:
        raise UserError(
            f"parallel.expert={expert} for a model of {experts} experts",
            "each of expert ranks holds an equal number of experts",
            f"use parallel.expert={' or '.join(map(str, divisors(experts)))}",
        )
    if optimizer == "muon":
        raise UserError(
            "optim.kind=muon for a model with experts",
            "Muon is not shown to be right for matrices of experts, which hold most of such a model",
            "use optim.kind=adamw",
        )
    sizes = (architecture.hidden_size, architecture.expert_size // tp)
    if compile and (not policy.startswith("bf16") or any(size % 8 for size in sizes)):
        raise UserError(
            f"parallel.compile=true with precision.policy={policy} for experts of {sizes[0]} x {sizes[1]} channels",
            "torch compiles the grouped product of experts in bf16, for channels in multiples of 8; other experts run one by "
            "one, and the host reads their numbers of rows",
            "use parallel.compile=false" + ("" if policy.startswith("bf16") else ", or precision.policy=bf16"),
        )
    if activation_gib is not None:
        raise UserError(
            f"parallel.activation_gib={activation_gib} for a model with experts",
            "what a sparse layer keeps depends on where its router sends the tokens, and is not counted beforehand",
            "remove parallel.activation_gib, and choose parallel.recompute=none, selective or full",
        )
