"""A run whose first epoch is by arrival: what it tells of shards that are still written, and how a resume knows them again."""

from collections.abc import Mapping
from typing import Any

from windlass.config import RunConfig
from windlass.data.prepare.prepare import Prepared, other_stream
from windlass.data.stream.arrival import Past
from windlass.training.drift import stream_to_keep


def past_of(capsule: Mapping[str, Any] | None, config: RunConfig, prepared: Prepared) -> Past | None:
    """The shards that the checkpoint has read, which the loader compares with those that lie there; None for a new run, another
    order, or where other data is accepted."""
    read = None if capsule is None else capsule.get("read_from")
    if capsule is None or read is None or config.data.order.first_epoch != "arrival":
        return None
    if stream_to_keep(dict(capsule), config) is None:
        return None
    return Past(read["num_shards"], read["shards"], other_stream(prepared.place))


def describe_length(config: RunConfig, total_steps: int, num_samples: int, is_whole: bool) -> str:
    """Steps, tokens and epochs of a run, as far as they are known."""
    samples = total_steps * config.sequences_per_step
    if is_whole:
        return f"{samples / num_samples:.2f} epochs"
    return f"{samples} samples, of which {num_samples} are prepared so far"


def describe_order(config: RunConfig, is_whole: bool) -> dict[str, str]:
    """How the first epoch is read, where that is said in the recipe."""
    if config.data.order.first_epoch != "arrival":
        return {}
    rest = "" if is_whole else "; data is still being prepared: no baselines, and later shards are not linted"
    return {"first epoch": f"by arrival, shuffled inside windows of {config.data.shuffle_window} shards{rest}"}
