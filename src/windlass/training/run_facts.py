"""What the first event says of a run for `windlass advise`, besides its settings: device, layout, sizes, FLOPs."""

import dataclasses
import math

from windlass.advice.facts import RunFacts
from windlass.advice.levers import USUAL_BUCKET_MIB
from windlass.model.architecture import Architecture, parameter_shapes
from windlass.model.flops import count_parameters, recomputed_flops
from windlass.parallel.config import ParallelConfig
from windlass.parallel.records import in_buckets
from windlass.parallel.stages import cut_stages
from windlass.precision.policy import precision_of
from windlass.ranks.owned_part import local_tensor
from windlass.training.run import Run
from windlass.training.start.parameter_rules import count_trained


def facts_of(run: Run, accumulation: int) -> RunFacts:
    """What `windlass advise` needs to know of a run besides its settings."""
    config, layout, architecture = run.config, run.program.mesh.layout, run.architecture
    shapes, precision = parameter_shapes(architecture), precision_of(config.precision)
    train = run.prepared.sets["train"]
    units, ends = num_units(architecture, config.parallel)
    in_fp8 = config.precision.cast_ahead(shapes, layout.shard, config.parallel.offload)
    return RunFacts(
        device=run.runtime.device_name(),
        ranks=layout.world,
        hosts=len(set(run.provenance["hosts"])),
        layout=dataclasses.asdict(layout),
        accumulation=accumulation,
        elements=count_parameters(architecture),
        end_elements=sum(math.prod(shape) for name, shape in shapes.items() if ".layers." not in name),
        trained_elements=count_trained(config, architecture),
        units=units,
        end_units=ends,
        gathered_bytes=precision.compute.itemsize,
        fp8_elements=sum(math.prod(shapes[name]) for name in in_fp8),
        reduced_bytes=precision.reduce.itemsize,
        buckets=_num_buckets(run, config.parallel.bucket_mib),
        usual_buckets=_num_buckets(run, USUAL_BUCKET_MIB),
        flops_per_token=run.recorder.flops.per_token,
        recomputed_flops=recomputed_flops(architecture, config.data.sequence_length)
        if config.parallel.recompute == "full"
        else 0.0,
        peak_flops=run.recorder.flops.peak,
        filled=train.tokens / max(1, train.tokens + train.padding),
    )


def num_units(architecture: Architecture, parallel: ParallelConfig) -> tuple[int, int]:
    """FSDP units of rank 0, in a pipeline those of its stages, and how many of them are outside of the blocks."""
    if parallel.pp == 1:
        layers, ends = [range(architecture.num_layers)], 1 if architecture.tied else 2
    else:
        stages = cut_stages(architecture, parallel.pp, parallel.schedule)
        own, last = stages.of_rank(0), len(stages.layers) - 1
        layers, ends = [stages.layers[stage] for stage in own], sum(stage in (0, last) for stage in own)
    return sum(-(-len(blocks) // parallel.blocks_per_unit) for blocks in layers) + ends, ends


def _num_buckets(run: Run, bucket_mib: float) -> int:
    """All-reduces of a step's gradients under zero 0. Beside tensor ranks and in a pipeline, where buckets are filled from the
    model's beginning, it may be off by a few."""
    itemsize = precision_of(run.config.precision).reduce.itemsize
    trained = [local_tensor(record.tensor) for record in run.program.records() if record.tensor.requires_grad]
    return sum(1 for _ in in_buckets([itemsize * one.numel() for one in reversed(trained)], bucket_mib))
