"""The same job in a peer's loop: transformers' Trainer on SmolLM3-3B at 8,192 tokens, as `headline.py` trains it here.

    python benchmarks/gpu/peer.py --minutes 4
    python benchmarks/gpu/peer.py --device cpu --tiny --out trial.json        # tries the script

Same architecture, random weights, synthetic tokens and tokens per step (65,536); the Trainer has its fastest known flags: bf16
autocast over fp32 weights, fused AdamW, no cache, SDPA, and in a cell of its own torch_compile. Micro-batches and gradient
checkpointing are tried from the fastest to the smallest until one fits. A step is timed from one of the Trainer's own step-end
callbacks to the next, with the device synchronised; the first two are not counted.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from book import Book, print_table
from cells import Cell, free, plain, run_script, sources_of
from step import TINY_MODEL, Setup, judged, memory_peak
from torch import nn

from windlass.model.families.presets import PRESETS

COUNTED, UNCOUNTED = 4, 2  # steps
TINY_CONFIG = {name: value for name, value in TINY_MODEL.items() if name != "family"} | {"model_type": "smollm3"}


@dataclass(frozen=True)
class Try:
    """What the Trainer is given."""

    length: int
    sequences: int
    """Per step."""
    micro_batch: int
    checkpointing: bool
    compile: bool


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Uniform tokens, another row each time."""

    def __init__(self, vocab_size: int, length: int, number: int):
        self._vocab_size, self._length, self._number = vocab_size, length, number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(row)
        ids = torch.randint(0, self._vocab_size, (self._length,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def make_cells(tiny: bool) -> list[Cell]:
    length, sequences = (64, 4) if tiny else (8192, 8)
    sizes = [(2, False), (1, False), (1, True)]
    cells = []
    for words, compiled in (("Trainer", False), ("Trainer, torch_compile", True)):
        tries = [Try(length, sequences, size, checkpointing, compiled) for size, checkpointing in sizes]
        cells.append(_cell(words, tries, tiny))
    return cells


def _cell(name: str, tries: list[Try], tiny: bool) -> Cell:
    def measure(device: torch.device) -> dict[str, Any]:
        attempts = []
        for one in tries:
            try:
                return measure_trainer(one, device, tiny) | {"before": attempts}
            except torch.OutOfMemoryError as error:
                attempts.append([vars(one), plain(str(error))[:200]])
            free(device)
        raise torch.OutOfMemoryError(f"none of {len(tries)} settings fits: {attempts[-1][1]}")

    sources = sources_of("benchmarks/gpu/peer.py", "src/windlass/model/families/presets.py")
    return Cell(name, 75.0, measure, sources, {"tries": [vars(one) for one in tries]})


def peer_model(tiny: bool, device: torch.device) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    given = dict(TINY_CONFIG if tiny else PRESETS["smollm3-3b"])
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    config.use_cache = False
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def measure_trainer(one: Try, device: torch.device, tiny: bool) -> dict[str, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_args: Any, **_more: Any) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    model: Any = peer_model(tiny, device)
    if one.checkpointing:
        model.gradient_checkpointing_enable()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            max_steps=UNCOUNTED + COUNTED,
            per_device_train_batch_size=one.micro_batch,
            gradient_accumulation_steps=one.sequences // one.micro_batch,
            bf16=True,
            optim="adamw_torch_fused",
            torch_compile=one.compile,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
        )
        rows = Rows(model.config.vocab_size, one.length, one.sequences * (UNCOUNTED + COUNTED))
        Trainer(model, arguments, train_dataset=rows, callbacks=[Clock()]).train()
    times = [two - first for first, two in zip(ends[UNCOUNTED - 1 :], ends[UNCOUNTED:])]
    tokens = one.sequences * one.length
    setup = Setup("tiny" if tiny else "smollm3-3b", one.length, one.sequences, one.micro_batch)
    rate = tokens / statistics.median(times)
    figures = judged(setup, setup.architecture(), rate, device)
    kept = {name: figures[name] for name in ("tflops_causal", "mfu_causal", "mfu_palm")}
    found = {"try": vars(one), "tokens_per_s": round(rate, 1), "step_ms": round(1e3 * statistics.median(times), 2)}
    return found | {"steps": len(times)} | kept | memory_peak(device)


def show(book: Book) -> None:
    lines = []
    for name, row in book.rows().items():
        if row["status"] != "measured":
            lines.append([name, row["status"], None, None, None, row["message"][:60]])
            continue
        one = row["result"]
        words = f"x{one['try']['micro_batch']}{', gradient checkpointing' if one['try']['checkpointing'] else ''}"
        mfu = None if one["mfu_causal"] is None else 100 * one["mfu_causal"]
        lines.append([name, one["tokens_per_s"], mfu, one["step_ms"], one["allocated_gib"], words])
    title = f"SmolLM3-3B at 8,192 by transformers on {book.run['device']}, torch {book.run['torch']}"
    print_table(title, ("loop", "tokens/s", "MFU %", "step ms", "GiB", ""), lines)


def main(arguments: list[str] | None = None) -> int:
    return run_script("peer", __doc__, make_cells, show, arguments)


if __name__ == "__main__":
    sys.exit(main())
