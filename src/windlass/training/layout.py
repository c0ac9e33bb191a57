"""The layout of a run in one line: its axes, and how a pipeline is cut and how long its ranks wait."""

from windlass.config import RunConfig
from windlass.model.architecture import Architecture
from windlass.parallel.config import MeshLayout
from windlass.parallel.stages import cut_stages


def describe_layout(config: RunConfig, layout: MeshLayout, architecture: Architecture, num_micro: int) -> str:
    """The idle share is that of gpipe and 1f1b with stages that take equal time."""
    parallel = config.parallel
    axes = [f"replicate {layout.replicate}", f"shard {layout.shard}"]
    axes = [f"pp {layout.pp}"] * (layout.pp > 1) + axes + [f"context {layout.context}"] * (layout.context > 1)
    axes += [f"tp {layout.tp}"] * (layout.tp > 1)
    experts = f", experts over {layout.expert} of shard x context" * (layout.expert > 1)
    told = f"{' x '.join(axes)}, zero {parallel.zero}" + f", {parallel.context_kind}" * (layout.context > 1) + experts
    if layout.pp == 1:
        return told
    stages = cut_stages(architecture, layout.pp, parallel.schedule)
    idle = (layout.pp - 1) / (num_micro + layout.pp - 1)
    word = "idle" if parallel.schedule in ("gpipe", "1f1b") else "1f1b would be idle for"
    return f"{told}; {parallel.schedule}, blocks {stages}; {word} {idle:.1%} of a step"
