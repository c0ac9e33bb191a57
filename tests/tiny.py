"""A recipe that trains in a second, on text that the test writes, and what ranks do with it."""

import json
import os
import random
import signal
from pathlib import Path

import torch

from windlass.config import RunConfig, check_recipe
from windlass.errors import UserError

STEPS = 10
MODEL = {
    "family": "qwen3",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
QWEN3_KEYS = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
QWEN3_KEYS += ["head_dim", "max_position_embeddings", "tie_word_embeddings"]


def write_corpus(directory: Path, documents: int = 60) -> Path:
    """Short texts over few words, the same every time."""
    draw = random.Random(3)
    words = ["wind", "rope", "anchor", "turn", "the", "a", "of", "pull", "ship", "slow", "heavy", "and", "deck"]
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        text = " ".join(draw.choice(words) for _ in range(draw.randint(40, 160)))
        (directory / f"{number:03d}.txt").write_text(f"{number} {text}.\n")
    return directory


def write_base(directory: Path, seed: int = 5, **changes: object) -> Path:
    """A model of transformers' own making, for `model.from`: wide enough for NF4 on two ranks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    wide = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    fields = {key: value for key, value in (MODEL | wide | changes).items() if key != "family"}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", vocab_size=300, **fields))
    model.save_pretrained(directory)
    return directory


def write_pairs(file: Path, pairs: int = 80, seed: int = 2) -> Path:
    """Of two answers to a word, the one that says it again is preferred."""
    draw, rows = random.Random(seed), []
    words = ["wind", "rope", "anchor", "turn", "pull", "ship", "slow", "heavy", "deck", "sail", "tide"]
    for _ in range(pairs):
        word, other = draw.sample(words, 2)
        rows.append({"prompt": f"say {word}: ", "chosen": word * 2, "rejected": " ".join([other] * draw.randint(1, 3))})
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def recipe(base: Path, name: str = "run", **sections: dict) -> RunConfig:
    """The tiny recipe, its data shared by all runs below `base`; `sections` override it key by key, None takes one out."""
    if not (base / "corpus").exists():
        write_corpus(base / "corpus")
    tree = {
        "run": {"directory": str(base / name), "steps": STEPS, "tokens_per_step": 128, "micro_batch": 2, "seed": 4},
        "model": MODEL,
        "data": {
            "sources": [{"path": str(base / "corpus")}],
            "tokenizer": {"train": 300},
            "directory": str(base / "data"),
            "sequence_length": 16,
            "validation": 0.1,
        },
        "optim": {"learning_rate": 3e-3, "warmup_steps": 2},
        "checkpoint": {"every_steps": 3, "keep_last": 10},
        "evaluate": {"every_steps": 5, "sequences": 6},
        "report": {"every_steps": 1},
    }
    for section, keys in sections.items():
        merged = {**tree.get(section, {}), **keys}
        tree[section] = {key: value for key, value in merged.items() if value is not None}
    return check_recipe(tree)


def train(config: RunConfig, kill: tuple[int, int] | None = None) -> dict:
    """On one rank: train; (rank, step) of `kill` dies by SIGKILL in the middle of that step. -> rows read, final weights."""
    from windlass.training import loop as page

    rows, original = [], page.gradient_norm
    rank = torch.distributed.get_rank()
    assemble = page.assemble

    def spy(*args, **more):
        run = assemble(*args, **more)
        take = run.source.next

        def next_batches():
            batches = take()
            rows.append(torch.cat([batch["input_ids"] for batch in batches]).tolist())
            return batches

        run.source.next = next_batches
        return run

    def clip(*args):
        if kill == (rank, run_step()):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    def run_step():
        return start[0] + len(rows)

    start = [0]
    page.assemble, page.gradient_norm = spy, clip
    try:
        result = page.train(config)
    finally:
        page.assemble, page.gradient_norm = assemble, original
    return {"rows": rows, "step": result.step}


def refusal(config: RunConfig) -> str:
    """On one rank: the UserError that training ends with, which ends no rank of the pool."""
    try:
        train(config)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was not refused")


def losses(directory: Path) -> dict[int, tuple[float, float]]:
    """step -> (loss, norm) of every line that still counts."""
    from windlass.report.events import read_events

    return {
        line["step"]: (line["loss"], line["gradient_norm"])
        for line in read_events(directory / "events.jsonl")
        if line["kind"] == "step"
    }


def lines(directory: Path) -> list[dict]:
    """Every event of a run, those too that no longer count."""
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def kinds(directory: Path) -> list[tuple[str, int]]:
    return [(line["kind"], line["step"]) for line in lines(directory)]
