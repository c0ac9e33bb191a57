"""Bytes per parameter that one more micro-batch moves besides its products, and that an update moves, counted.

    python benchmarks/step_bytes.py

A decoder of two wide blocks reads one token, so that what a parameter's size moves is its weights and gradients. One more
micro-batch is the difference of two and one. An update is the norm, its clip and the optimizer's step. Rows: how one process
computes in bf16.

    masters        precision/masters.py, gradients added in fp32: what `precision.policy: bf16` is on one process
    masters-bf16   the same with `precision.gradients: bf16`
    fsdp           FSDP2 on one rank, as before masters
    autocast       torch.autocast over weights in fp32, as other trainers compute
    ddp            `parallel.zero: 0` over two ranks: masters, whose gradients are summed once per step
    fsdp2 N        FSDP2 with `parallel.zero: N` over two ranks: nothing divides, and a shard of the weights is cast once for each
                   gather. `transport` is what collectives read and write; gloo's own copies are among copy_
    tp 2, pp 2     masters beside two tensor ranks, or on the first of two stages, per parameter of a rank
    fsdp tp 2      FSDP2 in their place, as before

Then the head's loss and its gradient, bytes per logit, a product's write and two products' reads of it among them: operator by
operator, and compiled (`parallel.compile`), where Inductor counts its kernels. A CPU keeps a row in its cache; on a GPU the
compiled pass reads it twice (2 bytes more).

Written to benchmarks/results/step_bytes.json; tests/benchmarks/test_step_bytes.py holds the limits: 12 bytes, 8 in bf16, and no
cast of a weight in a micro-batch.
"""

import argparse
import contextlib
import datetime
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from meters.moved import Moved, compiled_bytes

from windlass.model.config import ModelConfig
from windlass.model.head.head import Head
from windlass.model.head.loss import factor_bits
from windlass.model.head.one_pass import one_pass
from windlass.model.init import initialise
from windlass.optim.clip import gradient_norm
from windlass.optim.config import OptimConfig
from windlass.optim.elementwise import Storage
from windlass.optim.optimizer import make_optimizer
from windlass.parallel import build
from windlass.parallel.config import ParallelConfig
from windlass.parallel.mesh import make_mesh
from windlass.parallel.records import Record
from windlass.precision.config import PrecisionConfig
from windlass.precision.fp8_weights import cast_to, compiled_cast
from windlass.precision.policy import Precision, precision_of
from windlass.proof.pool import Ranks
from windlass.ranks.owned_part import local_tensor

RESULT = Path(__file__).parent / "results/step_bytes.json"
MODEL = {
    "family": "qwen3",
    "vocab_size": 128,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
ROWS: dict[str, dict[str, Any]] = {
    "masters": {},
    "masters-bf16": {"gradients": "bf16"},
    "fsdp": {"through_fsdp": True},
    "autocast": {"policy": "fp32"},
}
SHARDED: dict[str, dict[str, Any]] = {f"fsdp2 {zero}": {"zero": zero, "shard": 2} for zero in (3, 2, 1)}
REPLICATED: dict[str, dict[str, Any]] = {"ddp": {"zero": 0, "replicate": 2}}
"""On two ranks."""
BESIDE: dict[str, dict[str, Any]] = {
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2, "zero": 1},
    "fsdp tp 2": {"tp": 2, "through_fsdp": True},
}
"""On two ranks that cut nothing over `shard`."""
TRANSPORT = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
UPDATES: dict[str, dict[str, Any]] = {
    "gradients in fp32": {"policy": "bf16"},
    "gradients in bf16": {"policy": "bf16", "gradients": "bf16"},
    "states in bf16": {"policy": "bf16", "states": "bf16"},
    "bf16-pure": {"policy": "bf16-pure"},
}


def make(
    zero: int = 3,
    policy: Any = "bf16",
    gradients: Any = None,
    through_fsdp: bool = False,
    shard: int = 1,
    **beside: int,
) -> Any:
    config = ParallelConfig(zero=zero, shard=shard, **beside)
    architecture = ModelConfig.model_validate(MODEL).architecture()
    precision = precision_of(PrecisionConfig(policy=policy, gradients=gradients))
    mesh, device = make_mesh(config.layout(dist.get_world_size()), "cpu"), torch.device("cpu")
    chosen = (lambda *_: False) if through_fsdp else build.has_masters
    with mock.patch.object(build, "has_masters", chosen):
        fill = lambda named: initialise(named.items(), architecture, 3)  # noqa: E731
        program = build.build_program(architecture, build.Parallelism(config, precision, mesh, device), fill)
    if policy == "fp32":
        program.model.forward = torch.autocast("cpu", torch.bfloat16)(program.model.forward)  # type: ignore[attr-defined]
    return program, make_optimizer(program.records(), OptimConfig(), storage=Storage(gradients=precision.gradients))


def moved(program: Any, micro_batches: int, least: int) -> Moved:
    ids = torch.ones(1, program.mesh.layout.tp, dtype=torch.int64)  # a token for each tensor rank
    with Moved(least, weights=[record.tensor for record in program.records()]) as mode:
        program.run([{"input_ids": ids, "targets": ids}] * micro_batches, torch.tensor(1.0 * micro_batches))
    return mode


def row(**settings: Any) -> dict[str, Any]:
    program, optimizer = make(**settings)
    num_local = sum(local_tensor(record.tensor).numel() for record in program.records())
    num_parameters = num_local * program.mesh.layout.shard  # whose copies and gradients FSDP2 has whole
    least = MODEL["hidden_size"] * MODEL["num_attention_heads"]  # larger than any activation of one token, or of two
    by_count, least_count = {}, program.mesh.layout.pp  # a micro-batch for each stage
    for micro_batches in (least_count, least_count + 1):
        moved(program, micro_batches, least)  # the first step makes buffers
        optimizer.step(torch.tensor(0.5))
        by_count[micro_batches] = moved(program, micro_batches, least)
        with Moved(least) as update:
            optimizer.step(gradient_norm(program.records(), program.mesh.pp_group))
    few, many = by_count.values()
    more = {name: (many.bytes[name] - few.bytes[name]) / num_parameters for name in sorted(many.bytes)}
    of_the_first = few.total / num_parameters - (least_count - 1) * sum(more.values())
    if transport := sum(more.pop(name, 0.0) for name in TRANSPORT):
        more["transport"] = transport
    return {
        "bytes_per_parameter_and_micro_batch": round(sum(more.values()), 2),
        "by_operator": {name: round(size, 2) for name, size in more.items() if round(size, 2)},
        "bytes_per_parameter_of_the_first": round(of_the_first, 2),
        "casts_of_weights_per_micro_batch": many.casts - few.casts,
        "bytes_per_parameter_of_an_update": round(update.total / num_local, 2),
    }


def update_bytes(precision: Precision) -> float:
    """Per parameter, of the norm, and of the compiled update that clips, and writes the copy in bf16 of a master."""
    num_parameters = 1 << 16
    parameter = torch.nn.Parameter(torch.zeros(num_parameters, dtype=precision.stored))
    parameter.grad_dtype = precision.gradients
    parameter.grad = torch.zeros(num_parameters, dtype=precision.gradients)
    copy = torch.nn.Parameter(torch.zeros(num_parameters, dtype=precision.compute)) if precision.is_mixed else None
    record = Record("w", parameter, parameter.shape, copy=copy)
    storage = Storage(precision.states, precision.is_stochastic, gradients=precision.gradients, compiled=True)
    optimizer = make_optimizer([record], OptimConfig(), storage=storage)
    with Moved() as norm:
        gradient_norm([record], SimpleNamespace(size=lambda: 1))  # type: ignore[arg-type]  no stages
    return round((norm.total + compiled_bytes(lambda: optimizer.step(torch.tensor(0.5)))) / num_parameters, 2)


def cast_bytes(is_compiled: bool) -> float:
    """Per weight that is cast ahead to fp8: its matrix's largest number, and the eight bits."""
    codes, rows, scale = torch.empty(1 << 20, dtype=torch.float8_e4m3fn), torch.ones(1 << 20), torch.ones(())
    with Moved() as largest:
        torch._foreach_norm([rows], float("inf"))
    if is_compiled:
        return round(
            (largest.total + compiled_bytes(lambda: compiled_cast()(codes, rows, scale, torch.bfloat16))) / 2**20, 2
        )
    with Moved() as cast:
        cast_to(codes, rows, scale, torch.bfloat16)
    return round((largest.total + cast.total) / 2**20, 2)


def loss_bytes(dtype: torch.dtype, is_compiled: bool) -> float:
    """Per logit of a chunk, training."""
    tokens, vocabulary, hidden = 1024, 4096, 8
    head = Head(hidden, vocabulary, vocabulary).to(dtype)
    states = torch.randn(1, tokens, hidden, dtype=dtype, requires_grad=True)
    targets, factor = torch.randint(vocabulary, (1, tokens)), factor_bits(torch.tensor(tokens), dtype)
    extra = 0
    if is_compiled:
        logits, ones = torch.randn(tokens, vocabulary).to(dtype), torch.ones(tokens)
        compiled = torch.compile(one_pass, fullgraph=True)
        extra = compiled_bytes(lambda: compiled(logits, targets[0], ones, vocabulary, None, True))
        head._one_pass = lambda *_: torch.zeros(tokens)  # counted above: what is around it is left
    with Moved(least=tokens * vocabulary // 2, reads_of_products=True) as mode:
        head(states, targets, factor=factor).backward()
    return round((mode.total + extra) / (tokens * vocabulary), 2)


def counted(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """On every rank of a world that fits `rows`."""
    return {name: row(**settings) for name, settings in rows.items()}


def rows(ranks: Ranks) -> dict[str, Any]:
    found: dict[str, Any] = ranks.run(1, counted, ROWS)[0] | ranks.run(2, counted, SHARDED | REPLICATED | BESIDE)[0]
    for name, given in UPDATES.items():
        found[f"update compiled, {name}"] = {
            "bytes_per_parameter": update_bytes(precision_of(PrecisionConfig.model_validate(given)))
        }
    for is_compiled in (False, True):
        kind = "compiled" if is_compiled else "by operators"
        found[f"cast to fp8 {kind}"] = {"bytes_per_weight": cast_bytes(is_compiled)}
    for name, dtype in DTYPES.items():
        for is_compiled in (False, True):
            kind = "compiled" if is_compiled else "by operators"
            found[f"loss {kind}, {name}"] = {"bytes_per_logit": loss_bytes(dtype, is_compiled)}
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sys.modules["step_bytes"] = sys.modules[__name__]  # by which ranks find `counted`
    counted.__module__ = "step_bytes"
    with contextlib.closing(Ranks()) as ranks:
        found = rows(ranks)
    for name, one in found.items():
        print(f"{name:34}", {key: value for key, value in one.items() if key != "by_operator"})
        if "by_operator" in one:
            print(" " * 34, one["by_operator"])
    stamp = {
        "date": str(datetime.date.today()),
        "command": "python benchmarks/step_bytes.py",
        "torch": torch.__version__,
    }
    RESULT.write_text(json.dumps({**stamp, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
