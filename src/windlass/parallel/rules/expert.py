"""What mixtures of experts allow of a layout and of a recipe. No torch: recipes are checked before it is imported.

`expert` deals the experts of each sparse layer out over ranks that share parameters (shard x context), in equal numbers.
"""

from collections.abc import Iterator

from windlass.errors import UserError
from windlass.model.architecture import Architecture, divisors
from windlass.parallel.config import ParallelConfig


def expert_errors(expert: int, zero: int, compile: bool, recompute: str) -> Iterator[UserError]:
    """Settings that `parallel.expert` does not work with."""
    if expert == 1:
        return
    if zero == 0:
        yield UserError(
            f"parallel.zero=0 with parallel.expert={expert}",
            "zero 0 is DDP, which sums all gradients over all ranks; experts that are dealt out have owners",
            "use parallel.zero=1, 2 or 3",
        )
    if recompute == "selective":
        yield UserError(
            f"parallel.recompute=selective with parallel.expert={expert}",
            "experts that are dealt out are a unit of FSDP2 inside their block, and torch's selective recomputation fails at one",
            "use parallel.recompute=full or none",
        )
    if compile:
        yield UserError(
            f"parallel.compile=true with parallel.expert={expert}",
            "how many rows go to which rank is read by the host in every sparse layer, and a compiled block reads nothing",
            "use parallel.compile=false, or parallel.expert=1: experts then are cut by shard like all else",
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


def check_compiled_experts(architecture: Architecture, compiles: bool, device_type: str) -> None:
    """Raises UserError where blocks with experts would be compiled for a GPU. Measured on an H200 with torch 2.11: the loss was
    right, and gradients of what is below a sparse layer were wrong by factors of 590 to 19,300, another in each process. Operator
    by operator the same step was right, and on a CPU both are. The race behind it is looked for in what is compiled
    (training/sizing/compiled.py); that compiled experts without it are right no GPU has shown."""
    if compiles and architecture.sparse_layers and device_type == "cuda":
        raise UserError(
            "parallel.compile=true for a model with experts on a GPU",
            "on the one GPU tried (H200, torch 2.11) compiled experts gave wrong gradients below them, by factors of 590 "
            "to 19,300; not compiled, they are right",
            "use parallel.compile=false",
        )


def model_expert_errors(
    architecture: Architecture, parallel: ParallelConfig, policy: str | None, optimizer: str | None
) -> Iterator[UserError]:
    """Settings that a model's experts forbid, or that it has none. `policy` and `optimizer` None: not known."""
    expert, compile, activation_gib = parallel.expert, parallel.compiles, parallel.activation_gib
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
    sizes = (architecture.hidden_size, architecture.expert_size // parallel.tp)
    if compile and policy is not None and (not policy.startswith(("bf16", "fp8")) or any(size % 8 for size in sizes)):
        yield UserError(
            f"parallel.compile=true with precision.policy={policy} for experts of {sizes[0]} x {sizes[1]} channels",
            "torch compiles the grouped product of experts in bf16, for channels in multiples of 8; other experts run one by "
            "one, and the host reads their numbers of rows",
            "use parallel.compile=false" + ("" if policy.startswith(("bf16", "fp8")) else ", or precision.policy=bf16"),
        )
    if activation_gib is not None:
        yield UserError(
            f"parallel.activation_gib={activation_gib} for a model with experts",
            "what a sparse layer keeps depends on where its router sends the tokens, and is not counted beforehand",
            "remove parallel.activation_gib, and choose parallel.recompute=none, selective or full",
        )
