"""What is sent per step, counted: the formulas of parallel/ddp.py and parallel/fsdp.py, to the call."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.model.config import ModelConfig
from windlass.model.init import initialise
from windlass.parallel.build import build_program
from windlass.parallel.config import ParallelConfig, PrecisionConfig
from windlass.parallel.mesh import make_mesh
from windlass.parallel.precision import precision_of

BLOCKS = 3
UNITS = BLOCKS + 1
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


def make_program(world, zero, replicate, shard, policy="fp32"):
    config = ParallelConfig(zero=zero, replicate=replicate, shard=shard)
    architecture = ModelConfig.model_validate(MODEL).architecture()
    mesh = make_mesh(config.layout(world), "cpu")
    fill = lambda named: initialise(named.items(), architecture, 3)  # noqa: E731
    return build_program(
        architecture, config, precision_of(PrecisionConfig(policy=policy)), mesh, torch.device("cpu"), fill
    )


def batch(seed=0):
    ids = torch.randint(0, 150, (1, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}


class Collectives(TorchDispatchMode):
    """Counts c10d calls by name. (torch's CommDebugMode also tracks modules, and loses track under accumulation.)"""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.calls[function._schema.name.removeprefix("c10d::").strip("_")] += 1
        return function(*args, **(kwargs or {}))


def count_step(world, zero, replicate, shard, micro_batches):
    """{collective: calls} of the second step (the first makes buffers), on this rank."""
    program = make_program(world, zero, replicate, shard)
    count = torch.tensor(8.0 * micro_batches * world)
    for _ in range(2):
        program.model.zero_grad()
        with Collectives() as mode:
            program.run([batch(i) for i in range(micro_batches)], count)
    return dict(mode.calls)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("world", "zero", "replicate", "shard"), [(2, 3, 1, 2), (2, 2, 1, 2), (4, 3, 2, 2), (4, 2, 2, 2)])
def test_fsdp_sends_what_its_docstring_says(ranks, world, zero, replicate, shard, micro_batches):
    for counts in ranks.run(world, count_step, world, zero, replicate, shard, micro_batches):
        expected = {
            "allgather_base": UNITS if zero == 2 else micro_batches * (UNITS + BLOCKS),
            "reduce_scatter_base": micro_batches * UNITS,
            "allreduce": (UNITS if replicate > 1 else 0) + 1,  # and the loss
        }
        assert counts == expected


def count_ddp(micro_batches):
    """All-reduce calls of a step under DDP: through the hook, and with the loss's."""
    from windlass.parallel import ddp

    program = make_program(2, 0, 2, 1)
    calls = []
    send = ddp.dist.all_reduce
    ddp.dist.all_reduce = lambda *args, **kwargs: (calls.append(args[0].numel()), send(*args, **kwargs))[1]
    try:
        count = torch.tensor(8.0 * micro_batches * 2)
        for _ in range(2):
            calls.clear()
            program.run([batch(i) for i in range(micro_batches)], count)
    finally:
        ddp.dist.all_reduce = send
    return calls, sum(record.tensor.numel() for record in program.records())


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_ddp_sends_each_gradient_once_however_many_micro_batches(ranks, micro_batches):
    for calls, parameters in ranks.run(2, count_ddp, micro_batches):
        assert sum(calls) == parameters + 1, "every gradient once, and the loss"
        assert len(calls) == 1 + 1, "the model fits one bucket of 25 MiB"


def test_one_process_sends_nothing(ranks):
    (counts,) = ranks.run(1, count_step, 1, 3, 1, 1, 2)
    assert counts == {}
