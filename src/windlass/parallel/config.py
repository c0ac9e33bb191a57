"""The layout a recipe asks for, and the layout that a world of ranks makes of it.

A layout is a factorisation of the world: world = pp x replicate x shard x context x tp. Sizes of 1 are axes too. One of
`replicate` and `shard` may be -1: what the others leave. No torch here: the launcher and the planner need these numbers too.
parallel/rules holds what the settings allow of each other, of a model and of a world.
"""

import math
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, get_args

from pydantic import Field, model_validator

from windlass.errors import UserError
from windlass.settings import Settings

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]
Recompute = Literal["none", "selective", "full"]
RECOMPUTES: Final[tuple[Recompute, ...]] = get_args(Recompute)
"""The least first."""
Stage = Literal[0, 1, 2, 3]
"""How much ZeRO cuts."""
LEFT_OUT: Final[Stage] = 3
LEFT_OUT_BESIDE_PP: Final[Stage] = 1
"""`zero` where a recipe does not give it, without and with a pipeline."""


@dataclass(frozen=True)
class MeshLayout:
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
    """Ranks of the pipeline: each holds consecutive blocks, as one stage or two (`schedule`). The global batch's micro-batches
    flow through them. Works with zero 0 to 2."""
    replicate: int = Field(1, ge=-1)
    """Copies of the model (groups of ranks that all-reduce gradients). -1: all ranks that the other axes leave, which is the
    default with zero 0."""
    shard: int = Field(-1, ge=-1)
    """Ranks that share one copy of parameters, gradients and optimizer states (FSDP2). -1: all ranks that the other axes
    leave."""
    context: int = Field(1, ge=1)
    """Ranks that share each sequence: each takes a slice of its front half and a slice of its back half. Activations shrink by
    this factor, and with zero 1 to 3 parameters are sharded over shard x context. 2 x context must divide
    data.sequence_length."""
    tp: int = Field(1, ge=1)
    """Ranks that share each matrix, and the stream's positions (tensor and sequence parallelism)."""
    async_tp: bool = False
    """Have torch.compile cut what tensor ranks exchange, and the products beside it, into pieces, so that they compute while they
    send. For GPUs of one host, with tp above 1 and compile; micro-batches of one row overlap less. Not yet run on any GPU."""
    expert: int = Field(1, ge=1)
    """Ranks among which the experts of each sparse layer are divided; each holds its experts whole, and tokens travel to them.
    It divides shard x context and adds no ranks. 1: shard shards experts like all other parameters. Works with zero 1 to 3."""
    zero: Stage | Literal["auto"] = LEFT_OUT
    """What `shard` shards. If not given and pp is above 1: 1. 0: nothing (DDP over `replicate`). 1: optimizer states;
    whole gradients are summed over the micro-batches and sent once. 2: gradients too, sent on every micro-batch; parameters
    stay gathered through the step. 3: parameters too, gathered again in backward. auto: the lowest of these stages whose step
    fits, by its count: into half of a rank's share of the host's memory on CPUs, into the device on GPUs. Beside pp, tp, context,
    expert, offload and activation_gib nothing is counted, and auto is the default."""
    offload: bool = False
    """Keep parameters, gradients and optimizer states in host memory, and run the optimizer there; the device holds only the
    gathered blocks and the activations. Works with zero 1 to 3. Costs a copy over the bus per gather and per reduction."""
    bucket_mib: float = Field(25, gt=0)
    """Mebibytes per all-reduce of gradients, with zero 0: a smaller bucket starts earlier, a larger one sends fewer messages.
    The default is torch's."""
    blocks_per_unit: int = Field(1, ge=1)
    """Blocks that are gathered and reduced together, with zero 1 to 3: more blocks make fewer and larger collectives, and that
    many blocks are gathered at a time. The last unit may be smaller."""
    prefetch: int = Field(0, ge=0)
    """Units gathered ahead of the unit that computes, in forward and backward, with zero 1 to 3. Each holds its gathered
    parameters until then. 0: torch's own order (one ahead in backward; in forward when the host reaches it)."""
    recompute: Literal["auto", Recompute] = "auto"
    """Activations computed again in backward. full: every block keeps only its input. selective: blocks keep the outputs of
    matrix products and attention, and recompute the cheap rest. none: blocks keep all. auto: on a GPU the least recomputation
    with which enough tokens fit, as `run.micro_batch: auto`; on a CPU none."""
    activation_gib: float | None = Field(None, gt=0)
    """With recompute selective: GiB per rank that the blocks may keep for the backward of one micro-batch; with pp above 1, of
    all micro-batches that the schedule has in flight. Each block then recomputes none, selective or full, so that as little as
    possible is computed again. Head and embedding do not count."""
    check: bool = False
    """Check at every step that the ranks of a model-parallel group read the same batch, and that no gradient remains from the
    previous step. A fault is one named error on all ranks. The host then waits for the device at every step. (Whatever is set
    here, copies of weights and optimizer states on several ranks are compared before every checkpoint.)"""
    compile: bool | Literal["auto"] = "auto"
    """Compile each block with torch.compile (one graph for all blocks with the same recomputation), and AdamW's update if it
    stores in bf16 or the kernel is foreach. In a layer with experts only attention is compiled. Needs a C++ compiler on CPU.
    auto: true on a GPU that torch can compile for, if the layout allows it; false on a CPU."""
    schedule: Schedule = "1f1b"
    """Order of a pipeline's micro-batches, with pp above 1. gpipe: all forwards, then all backwards. 1f1b: keeps activations of
    at most pp micro-batches. interleaved-1f1b, interleaved-zero-bubble, zbv: two stages per rank, less idle time, more
    messages; the last two split backward in two."""
    context_kind: Literal["allgather", "ulysses"] = "allgather"
    """How context ranks exchange keys, with context above 1. allgather: every rank gets all keys and values; any number of
    heads. ulysses: ranks exchange positions for heads and back; this sends less if context is more than 1 + query heads per
    key/value head, and no rank keeps whole keys and values."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """What is left open follows from what is given, so that each field holds what it means, and a dump loads again."""
        if not isinstance(given, dict):
            return given
        if isinstance(given.get("pp"), int) and given["pp"] > 1:
            given = {"zero": LEFT_OUT_BESIDE_PP} | given
        if given.get("zero") == 0:
            return {"replicate": -1, "shard": 1} | given
        return {"shard": 1} | given if given.get("replicate") == -1 else given

    @property
    def zero_stage(self) -> Stage:
        """`zero`; where it is not chosen yet, what it is where it is left out."""
        if self.zero == "auto":
            return LEFT_OUT_BESIDE_PP if self.pp > 1 else LEFT_OUT
        return self.zero

    def with_zero(self, stage: Stage) -> Self:
        """A copy with another `zero`: with 0 the ranks of a shard that was left open become replicas. Raises UserError where
        shard is a number of ranks that zero 0 does not cut over."""
        if stage == 0 and self.shard == -1:
            return self.changed(zero=0, replicate=-1, shard=1)
        return self.changed(zero=stage)

    @property
    def recomputes(self) -> Recompute:
        """`recompute`; where it is not chosen yet, none."""
        return "none" if self.recompute == "auto" else self.recompute

    @property
    def compiles(self) -> bool:
        """`compile`; where it is not chosen yet, False."""
        return self.compile is True

    @property
    def computes_slices(self) -> bool:
        """Attention of a rank's slices of rows goes the way of rows that hold several documents."""
        return self.context > 1 and self.context_kind == "allgather"

    def layout(self, world: int) -> MeshLayout:
        """The sizes of all axes for `world` ranks. Raises UserError where they do not multiply to it."""
        others = {axis: size for axis in ("pp", "context", "tp") if (size := getattr(self, axis)) > 1}
        rest = world // math.prod(others.values())  # ranks for replicate x shard
        replicate, shard = self.replicate, self.shard
        if self.zero_stage == 0:
            shard = 1
        if replicate == -1:
            replicate = max(1, rest // shard)
        elif shard == -1:
            shard = max(1, rest // replicate)
        sizes = {**others, "replicate": replicate, "shard": shard}
        product = math.prod(sizes.values())
        if product != world:
            legal = ", ".join(f"{r}x{rest // r}" for r in range(1, rest + 1) if rest % r == 0)
            if math.prod(others.values()) * rest == world:
                choice = f", or choose replicate x shard among: {legal}"
            else:
                names = " x ".join(others)
                choice = (
                    f", or a multiple of {names} = {math.prod(others.values())}, or make {names} a divisor of {world}"
                )
            asked = {**sizes, "replicate": self.replicate} | ({} if self.zero_stage == 0 else {"shard": self.shard})
            filled = " (-1 takes the remaining ranks)" if -1 in asked.values() else ""
            raise UserError(
                f"{', '.join(f'parallel.{axis}={size}' for axis, size in asked.items())} on {world} rank{'s' * (world > 1)}",
                f"{' x '.join(sizes)} must be the number of ranks{filled}; here it is "
                f"{' x '.join(map(str, sizes.values()))} = {product}",
                f"start {product} ranks{choice}",
            )
        return MeshLayout(self.pp, replicate, shard, self.context, self.tp, self.expert)
