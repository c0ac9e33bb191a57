"""Is it right on this GPU? The gradients of a first step, compiled and not, against fp32 operator by operator; and are they the
same bits twice?

    python benchmarks/gpu/gradients.py --minutes 5
    python benchmarks/gpu/gradients.py --device cpu --tiny --out trial.json        # tries the script

`loss`: the distance from fp32's. `worst` and `median`: over tensors, the norm of the difference by fp32's norm; bf16 gives some
0.1, the worst a router's. `differ`: tensors whose gradients have other bits in a second step from the same weights and tokens.
`races`: kernels that were compiled for it and that windlass's own check finds to race (training/sizing/compiled.py).

What one process trains on a CPU is proved elsewhere (tests/proof). This is about kernels that only a GPU has: blocks with
experts, compiled whole for an H200 by torch 2.11, had a worst of 590, then 7,900, then 16,200, with the right loss. Since then
only their first half is compiled, and on an H200 that is right.
"""

import os
import statistics
import sys
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import step
import torch
from book import Book, print_table
from cells import Cell, run_script, sources_of
from step import SOURCES, Setup, Step, one_rank

from windlass.model import moe
from windlass.precision.same_bits import same_bits
from windlass.training.sizing.compiled import compiled_files, racing_in

SIZES: Final[dict[str, Any]] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
EXPERTS: Final = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "qwen3": {"family": "qwen3", **SIZES},
    "gemma2": {"family": "gemma2", "sliding_window": 128, **SIZES},
    "gemma2 2048 wide": {
        "family": "gemma2",
        "sliding_window": 128,
        **SIZES,
        "hidden_size": 2048,
        "intermediate_size": 9216,
        "head_dim": 256,
    },
    "qwen3_moe": {"family": "qwen3_moe", "output_router_logits": True, **SIZES, **EXPERTS},
}
SETUP: Final = Setup("tiny", 512, 16, 8)
DETERMINISTIC: Final = "bf16 compiled, run.deterministic"
FORMS: Final[dict[str, dict[str, Any]]] = {
    "bf16": {"compile": False},
    "bf16 compiled": {},
    "bf16 compiled, selective": {"recompute": "selective"},
    "fp8 compiled": {"policy": "fp8"},
    DETERMINISTIC: {},
}


def make_cells(tiny: bool) -> list[Cell]:
    setup = replace(SETUP, sequence_length=64, sequences_per_step=2, micro_batch=1) if tiny else SETUP
    models = [name for name in MODELS if not (tiny and name.endswith("wide"))]
    return [_cell(model, form, replace(setup, **change)) for model in models for form, change in FORMS.items()]


def _cell(model: str, form: str, setup: Setup) -> Cell:
    def measure(device: torch.device) -> dict[str, Any]:
        with mock.patch.object(step, "TINY_MODEL", MODELS[model]), one_rank(device):
            with mock.patch.object(moe, "is_grouped", lambda *_sizes: False):
                true_loss, reference = first_step(
                    replace(setup, policy="fp32", compile=False, recompute="none"), device
                )
            with same_bits(form == DETERMINISTIC):
                before = compiled_files()
                loss, found = first_step(setup, device)
                _, again = first_step(setup, device)
        off = {name: distance(found[name], one) for name, one in reference.items()}
        worst = max(off, key=lambda name: off[name])
        return {
            "loss": round(loss - true_loss, 6),
            "median": float(f"{statistics.median(off.values()):.3g}"),
            "worst": float(f"{off[worst]:.3g}"),
            "worst_tensor": worst,
            "differ": [name for name in found if not torch.equal(found[name], again[name])],
            "tensors": len(found),
            "races": sorted(name for file in compiled_files() - before for name in racing_in(file.read_text("utf-8"))),
        }

    sources = (*sources_of("benchmarks/gpu/gradients.py"), *sources_of(*SOURCES))
    return Cell(f"{model} {form}", 20.0, measure, sources, {"setup": vars(setup), "model": MODELS[model]})


def first_step(setup: Setup, device: torch.device) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and name -> gradient. The same weights and tokens every time."""
    torch.compiler.reset()
    one_step = Step(setup, setup.architecture(), device)
    loss, records = one_step.backward(), one_step.program.records()
    return float(loss), {one.name: one.tensor.grad.float() for one in records if one.tensor.grad is not None}


def distance(one: torch.Tensor, reference: torch.Tensor) -> float:
    return float((one.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-30))


def show(book: Book) -> None:
    lines: list[list[object]] = []
    for name, row in book.rows().items():
        if row["status"] != "measured":
            lines.append([name, row["status"], None, None, None, None, row["message"][:60]])
            continue
        one = row["result"]
        differ = f"{len(one['differ'])} of {one['tensors']}"
        races = len(one["races"])
        lines.append([name, one["loss"], one["median"], one["worst"], differ, races, one["worst_tensor"]])
    title = f"{book.run['device']}, torch {book.run['torch']}: gradients of a first step, against fp32"
    print_table(title, ("model and form", "loss", "median", "worst", "differ", "races", ""), lines)


def main(arguments: list[str] | None = None) -> int:
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # read once, before the first cell: precision/same_bits.py
    return run_script("gradients", __doc__, make_cells, show, arguments)


if __name__ == "__main__":
    sys.exit(main())
