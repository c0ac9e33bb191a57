"""A three-block model of odd sizes over any layout, its batches, and its gradients gathered: what the room's tests share."""

from collections import Counter

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.adapters.config import AdapterConfig
from windlass.model.config import ModelConfig
from windlass.model.init import initialise
from windlass.model.lora.adapter import adapter_of
from windlass.parallel.build import Parallelism, build_program
from windlass.parallel.config import ParallelConfig
from windlass.parallel.mesh import make_mesh
from windlass.precision.config import PrecisionConfig
from windlass.precision.policy import precision_of
from windlass.units import MIB

BLOCKS = 3
MODEL = {
    "family": "qwen3",
    "vocab_size": 150,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


def num_buckets(sizes_bytes, bucket_mib):
    """DDP's all-reduces per step, for gradients of one dtype that fill buckets with these sizes, in this order."""
    buckets, filled = 0, 0
    for size in sizes_bytes:
        filled += size
        if filled >= int(bucket_mib * MIB):
            buckets, filled = buckets + 1, 0
    return buckets + (filled > 0)


def make_program(
    world,
    zero=3,
    replicate=1,
    shard=1,
    policy="fp32",
    model=MODEL,
    plan=None,
    frozen=(),
    precision=None,
    adapter=None,
    **parallel,
):
    """On one of `world` ranks: the model of `model`, laid out, with the weights of seed 3. `plan`: each block's recomputation.
    `precision`: more of PrecisionConfig."""
    config = ParallelConfig(zero=zero, replicate=replicate, shard=shard, **parallel)
    architecture = ModelConfig.model_validate(model).architecture()
    mesh = make_mesh(config.layout(world), "cpu")
    precision = precision_of(PrecisionConfig(policy=policy, **(precision or {})))

    def fill(named):
        initialise(named.items(), architecture, 3)

    adapter = None if adapter is None else adapter_of(AdapterConfig(kind="lora", **adapter), architecture)
    parallelism = Parallelism(config, precision, mesh, torch.device("cpu"))
    return build_program(architecture, parallelism, fill, frozen, plan, adapter=adapter)


def batch(seed=0):
    ids = torch.randint(0, 150, (1, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}


def each(*calls):
    """On a rank: the result of every call, in one process group: a case of the pool for each would cost more."""
    return [call() for call in calls]


def full(tensor):
    """The whole tensor of a sharded one, detached."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def gradients(world, zero, replicate, shard, policy="fp64", **parallel):
    """(loss, {name: full gradient}, {name: stored dtype}) of two micro-batches, on one of `world` ranks."""
    program = make_program(world, zero, replicate, shard, policy, **parallel)
    first = 2 * program.mesh.batch_rank
    loss = program.run([batch(first), batch(first + 1)], torch.tensor(16.0 * world))
    grads = {record.name: full(record.tensor.grad) for record in program.records()}
    return loss.item(), grads, {record.name: str(record.tensor.dtype) for record in program.records()}


def assert_equal(one, two, tolerance):
    assert abs(one[0] - two[0]) <= tolerance
    assert one[1].keys() == two[1].keys()
    for name, gradient in one[1].items():
        assert (gradient - two[1][name]).abs().max() <= tolerance * gradient.abs().max(), name


class Operators(TorchDispatchMode):
    """Counts what is called, by name: aten operators plainly, collectives as c10d::name without underscores."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        space, _, name = function._schema.name.partition("::")
        self.calls[name if space == "aten" else f"{space}::{name.strip('_')}"] += 1
        return function(*args, **(kwargs or {}))

    def collectives(self):
        return {name.removeprefix("c10d::"): n for name, n in self.calls.items() if name.startswith("c10d::")}
