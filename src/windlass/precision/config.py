"""What a recipe says of precision: the policies as a table, the settings beside them, and what those mean together. No torch.

precision/policy.py gives the use and the cost of each policy.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from windlass.errors import UserError
from windlass.settings import Settings, Violation

Dtype = Literal["fp64", "fp32", "bf16", "fp16"]
Scaling = Literal["tensorwise", "rowwise"]
POLICIES: Final[dict[str, tuple[Dtype, Dtype, Dtype, Dtype]]] = {
    # stored  computed  reduced  states
    "fp64": ("fp64", "fp64", "fp64", "fp64"),
    "fp32": ("fp32", "fp32", "fp32", "fp32"),
    "bf16": ("fp32", "bf16", "fp32", "fp32"),
    "fp16": ("fp32", "fp16", "fp32", "fp32"),
    "bf16-pure": ("bf16", "bf16", "fp32", "bf16"),
    "fp8": ("fp32", "bf16", "fp32", "fp32"),  # as bf16, but for what products read
    "auto": ("fp32", "bf16", "fp32", "fp32"),  # what is counted before the devices are known
}
FP8_MULTIPLE: Final = 16
FASTEST_FALL: Final = 2.0**-8  # half a step of bf16, relative to the number, is 2^-9 to 2^-8


def is_fit(rows: int, columns: int) -> bool:
    """Whether fp8 can multiply a matrix of these sides."""
    return rows % FP8_MULTIPLE == columns % FP8_MULTIPLE == 0


def block_matrices(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, int]]:
    """The matrices of the blocks, of a model of these tensors; those of experts have three sides, and are none of them."""
    return {
        name: (shape[0], shape[1])
        for name, shape in shapes.items()
        if ".layers." in name and name.endswith("_proj.weight") and len(shape) == 2
    }


def unfit_errors(shapes: Mapping[str, Sequence[int]]) -> Iterator[UserError]:
    """Where fp8 can multiply no matrix of a model of these tensors."""
    sides = set(block_matrices(shapes).values())
    if not any(is_fit(*one) for one in sides):
        yield UserError(
            "precision.policy=fp8 for matrices of "
            + ", ".join(f"{rows} x {columns}" for rows, columns in sorted(sides)),
            f"fp8 multiplies matrices whose sides are multiples of {FP8_MULTIPLE}, and this model has none",
            f"use precision.policy=bf16, or model sizes that are multiples of {FP8_MULTIPLE}",
        )


class PrecisionConfig(Settings):
    policy: Literal["auto", "fp64", "fp32", "bf16", "fp16", "bf16-pure", "fp8"] = "auto"
    """auto: when the run begins, bf16 if every device has it (NVIDIA since Ampere), fp16 on older devices with tensor cores,
    else fp32. The run prints its choice and keeps it in resolved.yaml, and a resumed run keeps it too. fp32: everything in 32
    bits. bf16: fp32 master weights, moments and reductions, matrix products in bf16. fp16: the same with products in fp16 and a
    dynamic loss scale, for devices without bf16. bf16-pure: weights, gradients and moments in bf16, half the memory. fp8: bf16
    with the matrix products of the blocks in 8 bits, on NVIDIA GPUs since Ada and Hopper (extra `fp8`); CPUs emulate it. fp64:
    for proofs on CPU."""
    scaling: Scaling | None = None
    """With policy fp8, how many scales a matrix has in a product. tensorwise: one. rowwise: one per row, so that an outlier
    costs digits only in its own row, but the product is slower. If not given: tensorwise."""
    states: Literal["fp32", "bf16"] | None = None
    """Dtype of both moments of AdamW. If not given: as the policy says. bf16 with fp32 weights saves 4 bytes per parameter."""
    rounding: Literal["nearest", "stochastic"] | None = None
    """How weights and moments that are stored in bf16 are rounded. If not given: stochastic, by which small updates count in
    the mean. nearest loses every update below 1/512 of a weight; the run raises an alarm if that affects most of a tensor."""
    parameters: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype in which parameters are gathered and multiplied. If not given: as the policy says. fp32 with bf16-pure multiplies
    in fp32 the weights stored in bf16, which separates the rounding of weights from that of products."""
    gradients: Literal["fp32", "bf16"] | None = None
    """Dtype in which the gradients of a step's micro-batches are added and kept, on one process with policy bf16 or fp8. If not
    given: fp32. bf16 saves 2 bytes per parameter, moves 8 per micro-batch instead of 12, and loses digits with every
    micro-batch. An update that is not compiled then moves 210 bytes per parameter instead of 42."""
    reduce: Literal["fp32", "bf16"] | None = None
    """Dtype in which gradients are sent and summed over ranks. If not given: fp32 (fp64 with fp64). bf16 halves the bytes sent
    and loses digits with every rank, and under parallel.zero 1 and 2 with every micro-batch, since FSDP adds those in it
    too."""
    output: Literal["fp32", "bf16"] | None = None
    """Dtype of the model's output, the loss of a micro-batch, before it is summed over ranks. If not given: fp32 (fp64 with
    fp64). bf16 keeps three digits of it, like trainers that cast outputs."""

    @property
    def known_policy(self) -> str | None:
        """None: the devices decide, or the recipe's is wrong."""
        policy: str | None = self.known("policy")
        return None if policy == "auto" else policy

    @property
    def stored(self) -> Dtype:
        return POLICIES[self.policy][0]

    @property
    def computed(self) -> Dtype:
        return self.parameters or POLICIES[self.policy][1]

    @property
    def reduced(self) -> Dtype:
        return self.reduce or POLICIES[self.policy][2]

    @property
    def kept(self) -> Dtype:
        """Dtype of the optimizer's moments."""
        return self.states or POLICIES[self.policy][3]

    @property
    def added(self) -> Dtype:
        """Dtype in which a rank adds up a step's gradients, where FSDP2 does not."""
        return self.gradients or self.stored

    @property
    def fp8_scaling(self) -> Scaling | None:
        """None where nothing is multiplied in fp8."""
        return (self.scaling or "tensorwise") if self.policy == "fp8" else None

    def cast_ahead(self, shapes: Mapping[str, Sequence[int]], shards: int, is_offloaded: bool) -> list[str]:
        """Which tensors of a model of these `shapes` are kept in eight bits by `shards` ranks that share each, and gathered so
        (fp8_weights.py)."""
        if self.fp8_scaling != "tensorwise" or is_offloaded:
            return []
        return [name for name, sides in block_matrices(shapes).items() if is_fit(*sides) and sides[0] % shards == 0]

    @property
    def is_rounded(self) -> bool:
        """Whether the optimizer rounds what it stores."""
        return "bf16" in (self.stored, self.kept)

    @property
    def is_stochastic(self) -> bool:
        return self.is_rounded and self.rounding != "nearest"

    def rules(self) -> Sequence[Iterator[Violation]]:
        """Settings that contradict each other, or would have no effect."""
        return self._fp64(), self._pure(), self._rounding(), self._products(), self._gradients(), self._scaling()

    def _fp64(self) -> Iterator[UserError]:
        if self.policy == "fp64":
            others = {key: value for key in ("states", "reduce", "output") if (value := getattr(self, key)) is not None}
            if others:
                yield UserError(
                    "precision.policy=fp64 with " + " and ".join(f"precision.{key}={others[key]}" for key in others),
                    "fp64 is for proofs: everything in 64 bits",
                    f"remove {' and '.join(others)}, or use precision.policy=fp32",
                )

    def _pure(self) -> Iterator[UserError]:
        if self.policy == "bf16-pure" and self.states == "fp32":
            yield UserError(
                "precision.policy=bf16-pure with precision.states=fp32",
                "bf16-pure keeps weights, gradients and moments in bf16: 6 bytes per parameter for weights and moments",
                "remove precision.states, or use precision.policy=bf16 with precision.states=bf16 (8 bytes, fp32 weights)",
            )

    def _rounding(self) -> Iterator[UserError]:
        if self.rounding is not None and not self.is_rounded:
            yield UserError(
                f"precision.rounding={self.rounding} with precision.policy={self.policy} and moments in {self.kept}",
                "rounding says how the optimizer stores in bf16; here weights and moments keep all their digits",
                "remove precision.rounding, or set precision.states=bf16 or precision.policy=bf16-pure",
            )

    def _products(self) -> Iterator[UserError]:
        policy = self.policy
        is_widened = (policy, self.parameters) == ("bf16-pure", "fp32")
        if self.parameters not in (None, POLICIES[policy][1]) and not is_widened:
            name = "bf16-pure or bf16" if self.parameters == "bf16" else self.parameters
            yield UserError(
                f"precision.parameters={self.parameters} with precision.policy={policy}",
                "the policy says what is multiplied; only bf16-pure can be multiplied in another dtype, fp32",
                f"remove precision.parameters, or use precision.policy={name}",
            )

    def _gradients(self) -> Iterator[UserError]:
        if self.gradients is not None and self.policy not in ("bf16", "fp8"):
            yield UserError(
                f"precision.gradients={self.gradients} with precision.policy={self.policy}",
                "gradients have their own dtype only where fp32 weights are multiplied in bf16; elsewhere they have the "
                "weights' dtype",
                "remove precision.gradients, or use precision.policy=bf16 or fp8",
            )

    def _scaling(self) -> Iterator[UserError]:
        if self.scaling is not None and self.policy != "fp8":
            yield UserError(
                f"precision.scaling={self.scaling} with precision.policy={self.policy}",
                "scaling applies to products in fp8",
                "remove precision.scaling, or use precision.policy=fp8",
            )

    def errors_beside(
        self, zero: int, optimizer: str, beta2: float, is_offloaded: bool = False, adapter: str = "none"
    ) -> Iterator[UserError]:
        """Violated rules on `parallel.zero`, `optim.kind`, `optim.beta2`, `parallel.offload` and `adapter.kind`."""
        if self.policy == "fp8" and adapter != "none":
            yield UserError(
                f"precision.policy=fp8 with adapter.kind={adapter}",
                "an adapter freezes most matrices, and products in fp8 would still compute their gradients",
                "use precision.policy=bf16",
            )
        if self.gradients == "bf16" and is_offloaded:
            yield UserError(
                "precision.gradients=bf16 with parallel.offload=true",
                "offloaded parameters are gathered by FSDP2, which keeps their gradients in fp32",
                "remove precision.gradients, or set parallel.offload=false",
            )
        if self.gradients == "bf16" and optimizer != "adamw":
            yield UserError(
                f"precision.gradients=bf16 with optim.kind={optimizer}",
                "only AdamW steps fp32 weights by gradients in bf16",
                "remove precision.gradients, or use optim.kind=adamw",
            )
        if self.is_rounded and optimizer != "adamw":
            yield UserError(
                f"optim.kind={optimizer} with weights in {self.stored} and moments in {self.kept}",
                "only AdamW knows how to store in bf16: other updates would be rounded to the nearest and lost",
                "use optim.kind=adamw, or precision.policy=bf16 without precision.states",
            )
        if zero == 0 and (self.stored, self.computed) == ("bf16", "fp32"):
            yield UserError(
                "precision.parameters=fp32 with precision.policy=bf16-pure and parallel.zero=0",
                "only FSDP gathers parameters in another, wider dtype; DDP multiplies what is stored",
                "use parallel.zero=1 or 2, or remove precision.parameters",
            )
        if self.kept == "bf16" and not self.is_stochastic and 0 < 1 - beta2 < FASTEST_FALL:
            yield UserError(
                f"optim.beta2={beta2:g} with moments in bf16 and precision.rounding=nearest",
                f"where gradients get smaller the second moment falls by {1 - beta2:.2g} of itself per step, and bf16 rounds "
                f"back what is less than {FASTEST_FALL:.2g}: it would never fall again",
                "use precision.rounding=stochastic, or optim.beta2=0.99 or less",
            )
