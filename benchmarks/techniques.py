"""What each technique keeps and sends, counted: the figures of docs/techniques/.

    python benchmarks/techniques.py [--only ddp fsdp ...]

Each page's recipe (docs/techniques/*.yaml) is trained for 3 steps on gloo ranks of this machine by the job that `windlass train`
runs, as it is and with the changes of ROWS, and technique_meter counts in every rank. A model of 1.6 million parameters
is enough: counts are exact at any size, and the formulas of parallel/ that they are held against scale. They do not depend on how
fast or loaded the machine is; no time is measured, and none could be here (two cores show neither overlap nor bubbles).

Results are written to benchmarks/results/techniques.json, page by page and row by row: one entry per rank. A pipeline's ranks
also say what they ran; that log is laid on a unit clock (F, I and W of a rank's blocks take 1, B takes 2), each action as early
as its inputs are there.
"""

import argparse
import datetime
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from meters.technique_meter import measure

from windlass.config import RunConfig, load_recipe
from windlass.data.tokenize.tokenizer import save_trained, train_tokenizer
from windlass.hardware import cpu_name
from windlass.proof.pool import Ranks
from windlass.training.preflight import make_ready

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "techniques"
RESULTS = ROOT / "benchmarks" / "results" / "techniques.json"
BUDGET_GIB = 0.004

# page -> row -> (ranks, what the row changes of the page's recipe)
ROWS: dict[str, dict[str, tuple[int, tuple[str, ...]]]] = {
    "memory": {"one process": (1, ())},
    "ddp": {
        "DDP": (4, ()),
        "one micro-batch per step": (4, ("run.micro_batch=4",)),
        "buckets of 1 MiB": (4, ("parallel.bucket_mib=1",)),
    },
    "fsdp": {
        "ZeRO-1": (4, ("parallel.zero=1",)),
        "ZeRO-2": (4, ("parallel.zero=2",)),
        "ZeRO-3": (4, ()),
        "ZeRO-3, units of 2 blocks": (4, ("parallel.blocks_per_unit=2",)),
        "ZeRO-3, 2 copies (HSDP)": (4, ("parallel.replicate=2",)),
    },
    "tensor": {
        "tp 2": (2, ()),
        "tp 4": (4, ("parallel.tp=4",)),
        "tp 4, recompute: full": (4, ("parallel.tp=4", "parallel.recompute=full")),
        "tp 2 x shard 2": (4, ()),
    },
    "pipeline": {
        "gpipe": (4, ("parallel.schedule=gpipe",)),
        "1f1b": (4, ()),
        "interleaved-1f1b": (4, ("parallel.schedule=interleaved-1f1b",)),
        "interleaved-zero-bubble": (4, ("parallel.schedule=interleaved-zero-bubble",)),
        "zbv": (4, ("parallel.schedule=zbv",)),
        "pp 2 x shard 2, ZeRO-1": (4, ("parallel.pp=2",)),
        "pp 2 x shard 2, ZeRO-2": (4, ("parallel.pp=2", "parallel.zero=2")),
    },
    "context": {
        "allgather": (4, ()),
        "ulysses": (4, ("parallel.context_kind=ulysses",)),
        "allgather, recompute: full": (4, ("parallel.recompute=full",)),
        "context 2 x shard 2": (4, ("parallel.context=2", "parallel.shard=2")),
    },
    "expert": {
        "one process, 8 experts": (1, ("parallel.shard=1", "parallel.expert=1")),
        "shard 4": (4, ("parallel.expert=1",)),
        "shard 4, expert 2": (4, ("parallel.expert=2",)),
        "shard 4, expert 4": (4, ()),
    },
    "recompute": {
        "none": (1, ("parallel.recompute=none",)),
        "selective": (1, ()),
        f"selective, activation_gib: {BUDGET_GIB}": (1, (f"parallel.activation_gib={BUDGET_GIB}",)),
        "full": (1, ("parallel.recompute=full",)),
    },
    "precision": {
        "fp32": (4, ("precision.policy=fp32",)),
        "bf16": (4, ()),
        "bf16, states: bf16": (4, ("precision.states=bf16",)),
        "bf16, reduce: bf16": (4, ("precision.reduce=bf16",)),
        "fp16": (4, ("precision.policy=fp16",)),
        "bf16-pure": (4, ("precision.policy=bf16-pure",)),
        "fp8": (4, ("precision.policy=fp8",)),
        "fp8, scaling: rowwise": (4, ("precision.policy=fp8", "precision.scaling=rowwise")),
    },
    "lora": {
        "LoRA, one process": (1, ()),
        "LoRA, DDP": (4, ("parallel.zero=0",)),
        "LoRA, ZeRO-3": (4, ()),
        "LoRA, tp 4": (4, ("parallel.tp=4",)),
        "LoRA, one process, bf16": (1, ("precision.policy=bf16",)),
        "NF4, one process": (1, ("adapter.base=nf4",)),
        "NF4, ZeRO-3": (4, ("adapter.base=nf4",)),
        "NF4, tp 2": (2, ("adapter.base=nf4", "parallel.tp=2")),
        "NF4, one process, bf16": (1, ("adapter.base=nf4", "precision.policy=bf16")),
    },
    "dpo": {
        "LoRA, one process": (1, ()),
        "LoRA, ZeRO-3": (4, ()),
        "LoRA, one process, simpo": (1, ("objective.loss=simpo",)),
    },
}
WITH_BASE = ("lora", "dpo")


def config_of(page: str, folder: Path, run: str, changes: tuple[str, ...]) -> RunConfig:
    """The page's recipe, 3 steps of it, its files below `folder`."""
    ours = [
        f"run.directory={folder / run}",
        f"data.directory={folder / ('pairs' if page == 'dpo' else 'data')}",
        "run.steps=3",
        "report.every_steps=1",
    ]
    if page in WITH_BASE:
        ours.append(f"model.from={base_in(folder)}")
    if page == "dpo":
        ours.append(f"data.tokenizer.from={tokenizer_in(folder)}")
    return load_recipe(str(PAGES / f"{page}.yaml"), *ours, *changes)


def base_in(folder: Path) -> Path:
    """The other pages' model as a Hugging Face directory, with random weights: counts do not depend on them."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    base = folder / "base"
    if not base.exists():
        shape = load_recipe(str(PAGES / "memory.yaml")).model.hf_fields()
        torch.manual_seed(5)
        Qwen3ForCausalLM(Qwen3Config(**{**shape, "vocab_size": 512})).save_pretrained(base)
    return base


def tokenizer_in(folder: Path) -> Path:
    """Of the pairs, apart from the base: other pages train one of their own, and a base's own would be another."""
    tokenizer = folder / "tokenizer-of-pairs"
    if not tokenizer.exists():
        pairs = map(json.loads, (PAGES / "dpo.jsonl").read_text().splitlines())
        save_trained(train_tokenizer((f"{pair['prompt']}{pair['chosen']}" for pair in pairs), 300), tokenizer)
    return tokenizer


def count(ranks: Ranks, page: str, row: str, folder: Path, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """One row: what its ranks counted, and the layout. `more`: further changes of the recipe."""
    world, changes = ROWS[page][row]
    config = make_ready(
        config_of(page, folder, f"{page}-{list(ROWS[page]).index(row)}", changes + more), world, "cpu"
    ).config
    found = ranks.run(world, measure, config, timeout_s=600)
    layout = {axis: size for axis, size in vars(config.parallel.layout(world)).items() if size > 1}
    result: dict[str, Any] = {"ranks": world, "layout": layout, "losses": found[0].pop("losses")}
    for one in found[1:]:
        assert one.pop("losses") == result["losses"], "only rank 0 writes events, and all read them"
    logs = [one.pop("log", None) for one in found]
    if logs[0]:
        result["timeline"] = on_a_unit_clock(logs)
    return result | {"per_rank": found}


Action = tuple[str, int, int]


def on_a_unit_clock(logs: list[list[Action]]) -> list[list[tuple[str, int, int, float, float]]]:
    """Per rank: (kind, stage, micro-batch, start, end) of what it ran, in its order, each as early as its inputs are there."""
    last = max(stage for log in logs for _, stage, _ in log)
    cost = {kind: ticks * len(logs) / (last + 1) for kind, ticks in (("F", 1), ("B", 2), ("I", 1), ("W", 1))}
    done: dict[Action, float] = {}
    placed: list[list[tuple[str, int, int, float, float]]] = [[] for _ in logs]

    def inputs(kind: str, stage: int, chunk: int) -> list[Action]:
        if kind == "F":
            return [("F", stage - 1, chunk)] if stage else []
        if kind == "W":
            return [("I", stage, chunk)]
        return [("F", stage, chunk)] + ([("G", stage + 1, chunk)] if stage < last else [])

    while sum(map(len, placed)) < sum(map(len, logs)):
        before = sum(map(len, placed))
        for log, row in zip(logs, placed, strict=True):
            while len(row) < len(log) and all(need in done for need in inputs(*log[len(row)])):
                kind, stage, chunk = action = log[len(row)]
                start = max([row[-1][4] if row else 0.0, *(done[need] for need in inputs(*action))])
                done[kind, stage, chunk] = end = start + cost[kind]
                if kind in "BI":
                    done["G", stage, chunk] = end
                row.append((kind, stage, chunk, start, end))
        assert sum(map(len, placed)) > before, "the log waits for itself"
    return placed


def write(pages: dict[str, Any]) -> None:
    """A line per row, so that a change shows which."""
    head = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/techniques.py",
        "machine": {"cpu": cpu_name()},
        "versions": {"torch": importlib.metadata.version("torch")},
        "unit": "bytes, of one training step, per rank; counted, not timed",
    }
    parts = []
    for page in (page for page in ROWS if page in pages):
        rows = ",\n".join(f"   {json.dumps(row)}: {json.dumps(found)}" for row, found in pages[page].items())
        parts.append(f"  {json.dumps(page)}: {{\n{rows}\n  }}")
    body = ",\n".join(parts)
    RESULTS.write_text(json.dumps(head, indent=1)[:-2] + f',\n "pages": {{\n{body}\n }}\n}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS), help="Pages to count again.")
    chosen = parser.parse_args().only
    pages = json.loads(RESULTS.read_text())["pages"] if RESULTS.exists() else {}
    ranks = Ranks()
    with tempfile.TemporaryDirectory() as folder:
        for page in chosen:
            pages[page] = {}
            for row in ROWS[page]:
                pages[page][row] = count(ranks, page, row, Path(folder))
                print(f"{page}: {row}: loss {pages[page][row]['losses'][-1]:.6f}", flush=True)
            write(pages)
    ranks.close()


if __name__ == "__main__":
    main()
