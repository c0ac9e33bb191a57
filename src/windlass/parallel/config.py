"""The layout a recipe asks for, and the layout that a world of ranks makes of it.

A layout is a factorisation of the world: world = pp x replicate x shard x context x tp. Sizes of 1 are axes too. One of
`replicate` and `shard` may be -1: what the others leave. No torch here: the launcher and the planner need these numbers too.
"""

from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from windlass.errors import UserError
from windlass.settings import Settings

LATER = ("pp", "context", "tp", "expert")
"""Axes that exist in the mesh and in the recipe, and that no technique of this version cuts along."""


@dataclass(frozen=True)
class Layout:
    """Every axis with its size; `world` is their product. expert divides shard x context and adds no ranks."""

    pp: int
    replicate: int
    shard: int
    context: int
    tp: int
    expert: int

    @property
    def world(self) -> int:
        return self.pp * self.replicate * self.shard * self.context * self.tp

    @property
    def batch_ranks(self) -> int:
        """Ranks along which samples differ: a global batch is cut into this many parts."""
        return self.replicate * self.shard


class ParallelConfig(Settings):
    pp: int = Field(1, ge=1)
    """Pipeline stages. This version trains with 1."""
    replicate: int = Field(1, ge=-1)
    """Copies of the model (groups of ranks that all-reduce gradients). -1: what the other axes leave; so too with zero 0
    where it is not given."""
    shard: int = Field(-1, ge=-1)
    """Ranks that share one copy of parameters, gradients and optimizer states (FSDP2). -1: what the other axes leave."""
    context: int = Field(1, ge=1)
    """Ranks that share one sequence. This version trains with 1."""
    tp: int = Field(1, ge=1)
    """Ranks that share each matrix. This version trains with 1."""
    expert: int = Field(1, ge=1)
    """Ranks that share the experts. This version trains with 1."""
    zero: Literal[0, 2, 3] = 3
    """What `shard` cuts. 0: nothing (DDP over `replicate`). 2: gradients and optimizer states; parameters stay gathered
    through forward and backward. 3: parameters too; gathered again in backward."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in backward. full: every block keeps only its input. selective: matrix products and
    attention are kept, the cheap rest is recomputed. none: all is kept."""
    compile: bool = False
    """Compile each block with torch.compile (one graph for all blocks). Needs a C++ compiler on CPU."""
    schedule: Literal["1f1b"] = "1f1b"
    """Order of a pipeline's micro-batches. Only its default, since pp is 1 in this version."""
    context_kind: Literal["allgather"] = "allgather"
    """How context ranks exchange keys and values. Only its default, since context is 1 in this version."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """What is left open follows from what is given, so that each field holds what it means, and a dump loads again."""
        if not isinstance(given, dict):
            return given
        if given.get("zero") == 0:
            return {"replicate": -1, "shard": 1} | given
        return {"shard": 1} | given if given.get("replicate") == -1 else given

    @model_validator(mode="after")
    def _check(self) -> Self:
        for axis in LATER:
            if getattr(self, axis) != 1:
                raise UserError(
                    f"parallel.{axis}={getattr(self, axis)}",
                    f"this version cuts along replicate and shard only; {', '.join(LATER)} must be 1",
                    f"remove parallel.{axis}, and use parallel.shard for a model that does not fit one device",
                )
        for axis, size in (("replicate", self.replicate), ("shard", self.shard)):
            if size == 0:
                raise UserError(f"parallel.{axis}=0", "an axis has at least 1 rank", "use 1, or -1 for what is left")
        if self.replicate == -1 and self.shard == -1 and self.zero != 0:
            raise UserError(
                "parallel.replicate=-1 and parallel.shard=-1",
                "only one axis can take what is left",
                "give one of them a number: shard = ranks per node is the usual choice (HSDP)",
            )
        if self.zero == 0 and self.shard not in (-1, 1):
            raise UserError(
                f"parallel.zero=0 with parallel.shard={self.shard}",
                "zero 0 is DDP: every rank keeps the whole model, nothing is cut along shard",
                f"use parallel.replicate={self.shard}, or parallel.zero=2 or 3",
            )
        return self

    def layout(self, world: int) -> Layout:
        """The sizes of all axes for `world` ranks. Raises UserError where they do not multiply to it."""
        replicate, shard = self.replicate, self.shard
        if self.zero == 0:
            shard = 1
        if replicate == -1:
            replicate = max(1, world // shard)
        elif shard == -1:
            shard = max(1, world // replicate)
        if replicate * shard != world:
            legal = ", ".join(f"{r}x{world // r}" for r in range(1, world + 1) if world % r == 0)
            raise UserError(
                f"parallel.replicate={replicate}, parallel.shard={shard} on {world} ranks",
                f"replicate x shard must be the number of ranks; here it is {replicate} x {shard} = {replicate * shard}",
                f"start {replicate * shard} ranks, or choose replicate x shard among: {legal}",
            )
        return Layout(1, replicate, shard, 1, 1, 1)


class PrecisionConfig(Settings):
    policy: Literal["fp64", "fp32", "bf16"] = "fp32"
    """fp32: all in 32 bits. bf16: fp32 master weights and reductions, matrix products in bf16. fp64: for proofs on CPU."""
