"""How many graphs each family compiles under each policy, and what compiles again: counts, no times.

    python benchmarks/graphs.py

A tiny model of every family in model/families, as `parallel.compile: true` builds it on one process: each block on its own, and
the head's loss. A run takes four steps of two micro-batches, with one evaluation behind the first.

    graphs            traced by the first step and the evaluation, which builds no backward. One graph serves all blocks of a kind
                      (a window, no positions, the first half of a sparse layer); the rest are the head's loss
    breaks            places at which a graph ends inside of a block
    again             graphs more in later steps, which have other data of the same shape
    more documents    graphs more in the third step. Rows are of one shape through a run (data/stream/collate.py fills the last
                      batch up); with data.isolate what changes is the room for documents in them, and the third step has more
    yet more          graphs more in the fourth step, which has more again: the third made graphs for any number

`plain` has rows of one document. Graphs are counted by torch._dynamo, before a backend makes
kernels of them, so the backend here is `eager`; on a GPU blocks are traced alike. fp8 is emulated by torchao on a CPU.

Written to benchmarks/results/graphs.json; tests/benchmarks/test_graphs.py holds the rows.
"""

import argparse
import contextlib
import datetime
import functools
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters

from windlass.data.batch_fields import Batch
from windlass.model.config import ModelConfig
from windlass.model.families.family_table import FAMILIES
from windlass.model.init import initialise
from windlass.parallel.build import Parallelism, build_program
from windlass.parallel.config import ParallelConfig
from windlass.parallel.mesh import make_mesh
from windlass.precision.config import PrecisionConfig
from windlass.precision.policy import precision_of
from windlass.proof.pool import Ranks

RESULT = Path(__file__).parent / "results/graphs.json"
POLICIES = ("fp32", "bf16", "bf16-pure", "fp8")
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
GPT2 = {"vocab_size": 256, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MORE: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 7},
    "starcoder2": {"sliding_window": 7},
    "smollm3": {"no_rope_layer_interval": 2},
    "gemma2": {"sliding_window": 7, "head_dim": 16},
    "gemma3_text": {"sliding_window": 7, "sliding_window_pattern": 2, "head_dim": 16},
    "exaone4": {"sliding_window": 7, "sliding_window_pattern": 2},
    "olmo3": {"sliding_window": 7},
    "cohere2": {"sliding_window": 7},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
}
"""What makes blocks of several kinds, where a family has them."""
LENGTH, ROWS = 16, 2
BORDERS = ((3, 5, 9), (1, 2, 4), (2, 3, 4, 7, 9), (1, 2, 3, 4, 5, 6, 8))
"""Where documents begin, by step."""


def model_of(family: str) -> ModelConfig:
    sizes = GPT2 | NO_DROPOUT if family == "gpt2" else SIZES
    return ModelConfig.model_validate({"family": family, **sizes, **MORE.get(family, {})})


def batches_of(step: int, is_isolated: bool) -> list[Batch]:
    """The two micro-batches of a step."""
    draw = torch.Generator().manual_seed(step)
    ids = [torch.randint(0, 256, (ROWS, LENGTH + 1), generator=draw) for _ in range(2)]
    found: list[Batch] = [{"input_ids": one[:, :-1], "targets": one[:, 1:]} for one in ids]
    if is_isolated:
        for batch in found:
            batch["documents"] = torch.tensor([[0, *BORDERS[step]]] * ROWS)
    return found


def count(family: str, policy: str, is_isolated: bool) -> dict[str, int]:
    """In a world of one process."""
    torch._dynamo.reset()
    counters.clear()
    config, architecture = ParallelConfig(compile=True), model_of(family).architecture()
    precision, mesh = (
        precision_of(PrecisionConfig.model_validate({"policy": policy})),
        make_mesh(config.layout(1), "cpu"),
    )
    seen = []
    with mock.patch.object(
        torch, "compile", functools.partial(torch.compile, backend="eager")
    ):  # traces, makes no kernels
        fill = lambda named: initialise(named.items(), architecture, 3)  # noqa: E731
        program = build_program(architecture, Parallelism(config, precision, mesh, torch.device("cpu")), fill)
        for step in range(len(BORDERS)):
            batches = batches_of(step, is_isolated)
            program.run(batches, torch.tensor(2.0 * ROWS * LENGTH))
            if step == 0:
                program.evaluate(batches)
            seen.append(counters["stats"]["unique_graphs"])
    breaks = sum(counters["graph_break"].values())
    torch._dynamo.reset()
    first, second, third, last = seen
    if not is_isolated:
        return {"graphs": first, "breaks": breaks, "again": last - first}
    more = {"more documents": third - second, "yet more": last - third}
    return {"graphs": first, "breaks": breaks, "again": second - first, **more}


def counted(families: list[str], policies: list[str]) -> dict[str, dict[str, int]]:
    return {
        f"{family}, {policy}, {kind}": count(family, policy, kind == "isolated")
        for family in families
        for policy in policies
        for kind in ("plain", "isolated")
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sys.modules["graphs"] = sys.modules[__name__]  # by which a rank finds `counted`
    counted.__module__ = "graphs"
    with contextlib.closing(Ranks()) as ranks:
        (found,) = ranks.run(1, counted, list(FAMILIES), list(POLICIES), timeout_s=3600)
    for name, row in found.items():
        print(f"{name:34}", row)
    facts = {"date": str(datetime.date.today()), "command": "python benchmarks/graphs.py", "torch": torch.__version__}
    RESULT.write_text(json.dumps({**facts, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
