"""The same job in peers' loops: transformers' Trainer and LitGPT on SmolLM3-3B at 8,192 tokens, as `headline.py` trains it here.

    python benchmarks/gpu/peer.py --minutes 6
    python benchmarks/gpu/peer.py --device cpu --tiny --out trial.json        # tries the script
    PYTHONPATH=src .venv-litgpt/bin/python benchmarks/gpu/peer.py --only LitGPT    # where scripts/litgpt_environment.sh made it

Same architecture, random weights, synthetic tokens and tokens per step (65,536); the Trainer has its fastest known flags: bf16
autocast over fp32 weights, fused AdamW, no cache, SDPA, and in a cell of its own torch_compile. Micro-batches and gradient
checkpointing are tried from the fastest to the smallest until one fits. A step is timed from one of the Trainer's own step-end
callbacks to the next, with the device synchronised; the first two are not counted.

LitGPT's model trains by the calls of its own `pretrain` on one device: Fabric in bf16-true (weights, gradients and moments in
bf16), its chunked loss, fused AdamW, a clip at 1.0, and torch.compile of the whole model, which it always has. Its model rotates
queries and keys in every layer, SmolLM3 in three of four.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from book import Book, print_table
from cells import Absent, Cell, free, plain, run_script, sources_of
from step import TINY_MODEL, Setup, judged, memory_peak
from torch import nn

from windlass.model.families.presets import PRESETS

COUNTED, UNCOUNTED = 4, 2  # steps
TINY_CONFIG = {name: value for name, value in TINY_MODEL.items() if name != "family"} | {"model_type": "smollm3"}


@dataclass(frozen=True)
class Try:
    """What a loop is given."""

    length: int
    sequences: int
    """Per step."""
    micro_batch: int
    checkpointing: bool
    compile: bool


def synchronised_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


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
        cells.append(_cell(words, measure_trainer, tries, tiny))
    tries = [Try(length, sequences, size, checkpointing=False, compile=True) for size in (2, 1)]
    return [*cells, _cell("LitGPT", measure_litgpt, tries, tiny)]


def _cell(name: str, loop: Callable[[Try, torch.device, bool], dict[str, Any]], tries: list[Try], tiny: bool) -> Cell:
    def measure(device: torch.device) -> dict[str, Any]:
        attempts = []
        for one in tries:
            try:
                return loop(one, device, tiny) | {"before": attempts}
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
            ends.append(synchronised_s(device))

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
    return figures_of(one, ends, device, tiny)


def measure_litgpt(one: Try, device: torch.device, tiny: bool) -> dict[str, Any]:
    try:
        import lightning
        from litgpt.model import GPT
        from litgpt.utils import chunked_cross_entropy
    except ModuleNotFoundError as error:
        raise Absent(f"no {error.name}: sh scripts/litgpt_environment.sh makes an environment for it") from None
    fabric = lightning.Fabric(accelerator=device.type, devices=1, precision="bf16-true")
    with fabric.init_module():
        model: Any = GPT(litgpt_config(one.length, tiny))
    model.transformer.wte.weight = model.lm_head.weight
    model = fabric.setup(torch.compile(model))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), 1e-4, fused=device.type == "cuda"))
    number = one.sequences * (UNCOUNTED + COUNTED)
    rows = Rows(model.config.vocab_size, one.length + 1, number)  # its loss cuts inputs and targets
    ids = torch.stack([rows[index]["input_ids"] for index in range(number)])
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(ids, batch_size=one.micro_batch))
    accumulation, ends = one.sequences // one.micro_batch, list[float]()
    for micro, batch in enumerate(loader, 1):
        loss = chunked_cross_entropy(model(batch[:, :-1].contiguous()), batch[:, 1:].contiguous())
        fabric.backward(loss / accumulation)
        if micro % accumulation == 0:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            ends.append(synchronised_s(device))
    return figures_of(one, ends, device, tiny)


def litgpt_config(length: int, tiny: bool) -> Any:
    from litgpt.config import Config

    given = TINY_CONFIG if tiny else PRESETS["smollm3-3b"]
    return Config(
        block_size=length,
        n_layer=given["num_hidden_layers"],
        n_embd=given["hidden_size"],
        vocab_size=given["vocab_size"],
        padded_vocab_size=given["vocab_size"],
        n_head=given["num_attention_heads"],
        n_query_groups=given["num_key_value_heads"],
        intermediate_size=given["intermediate_size"],
        rotary_percentage=1.0,
        rope_base=int(given.get("rope_theta", 10_000)),
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )


def figures_of(one: Try, ends: list[float], device: torch.device, tiny: bool) -> dict[str, Any]:
    """`ends`: of all steps, in seconds."""
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
    title = f"SmolLM3-3B at 8,192 by other loops on {book.run['device']}, torch {book.run['torch']}"
    print_table(title, ("loop", "tokens/s", "MFU %", "step ms", "GiB", ""), lines)


def main(arguments: list[str] | None = None) -> int:
    return run_script("peer", __doc__, make_cells, show, arguments)


if __name__ == "__main__":
    sys.exit(main())
