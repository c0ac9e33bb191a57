"""What a start or a resume writes into its event beside words: numbers that advice needs and that the recipe does not have."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Self


@dataclass(frozen=True)
class RunFacts:
    """The figures of one session of a run. Elements are counted over the whole model; bytes are those of one element."""

    device: str
    """The device's name as torch gives it; "CPU"."""
    ranks: int
    hosts: int
    layout: dict[str, int]
    """Sizes of the axes pp, replicate, shard, context, tp, expert."""
    accumulation: int
    """Micro-batches of a rank per step."""
    elements: int
    """Parameters."""
    end_elements: int
    """Parameters outside of the blocks: embedding, final norm, head."""
    trained_elements: int
    """Parameters, or an adapter's factors, that have gradients."""
    units: int
    """FSDP2 units: see parallel/fsdp."""
    end_units: int
    """FSDP2 units outside of the blocks."""
    gathered_bytes: int
    """Bytes of an element that is gathered, or multiplied, but for `fp8_elements`."""
    fp8_elements: int
    """Parameters that FSDP2 gathers in one byte each."""
    reduced_bytes: int
    """Bytes of an element of a gradient that is summed over ranks."""
    buckets: int
    """All-reduces of a step's gradients under zero 0."""
    usual_buckets: int
    """All-reduces of a step's gradients under zero 0 with the usual `parallel.bucket_mib`."""
    flops_per_token: float
    """Forward and backward, causal: what the MFU counts."""
    recomputed_flops: float
    """Per token, done a second time in backward."""
    peak_flops: float | None
    """Peak FLOP/s of one device in 16 bits; None where it is unknown, or where the run computes in fp32."""
    filled: float
    """Share of the positions of the prepared rows that hold a token."""

    def to_event(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_event(cls, found: Any) -> Self | None:
        """None where the event has none, or not all of them."""
        if not isinstance(found, dict) or not {field.name for field in fields(cls)} <= found.keys():
            return None
        return cls(**{field.name: found[field.name] for field in fields(cls)})
