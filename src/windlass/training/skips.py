"""What a run may leave out of its data, and how its ranks agree on it (the rule itself: `windlass.data.stream.skip`)."""

from windlass.config import RunConfig
from windlass.data.prepare.manifest import Prepared
from windlass.data.stream.skip import Complaint, SkipRule
from windlass.runtime import Runtime
from windlass.training.restore import Start


def skip_rule(config: RunConfig, runtime: Runtime, prepared: Prepared, start: Start) -> SkipRule | None:
    """None where nothing may be left out and nothing has been: then nothing is sent for it either. What was left out of another
    stream, whose drift was accepted, says nothing of this one."""
    since = start.skipped if start.stream == prepared.stream else {}
    limit = config.data.max_bad_shards
    if limit == 0 and not since:
        return None
    return SkipRule(limit, since, lambda found: _joined(runtime, found))


def _joined(runtime: Runtime, found: dict[int, Complaint]) -> dict[int, Complaint]:
    """What any rank found, on all ranks alike; of several complaints the first rank's. Per call 8 bytes are all-reduced over
    gloo, and the complaints are gathered only where there are some. Collective."""
    if not runtime.max_over_ranks(len(found)):
        return {}
    joined: dict[int, Complaint] = {}
    for of_rank in runtime.gathered(found):
        joined = of_rank | joined
    return joined
