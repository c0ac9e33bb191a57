"""Does a finetuned model use its prompt? Two experiments, each answer beside its control. The tables of docs/howto/finetune.md.

    python benchmarks/use_of_the_prompt.py copy                                  # nothing but this script
    python benchmarks/use_of_the_prompt.py summaries ENGLISH.txt MEETINGS        # a folder with train.jsonl and validation.jsonl

A finetuned model's loss falls also where it learns the style of the answers alone. Two controls separate style from use: the same
model asked with another row's prompt, and a model trained on shuffled pairs, whose every prompt has another row's answer.

copy: the prompt is a word of six random letters, and so is the answer. The base model is pretrained on texts that hold such a
word twice, as far apart as in a chat, but in no chat. Exact match of greedy answers to held-out words.
summaries: rows of MEETINGS have `transcript` and `summary`. The base model is pretrained on ENGLISH. Nats per answer token of
each held-out meeting.

One base model per experiment; the seeds are those of finetuning: factors, order of the data, and how the pairs are shuffled.
Results are written to benchmarks/results/use_of_the_prompt.json, the other experiment's kept.
"""

import datetime
import importlib.metadata
import json
import platform
import random
import re
import runpy
import statistics
import string
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from finetune import TEMPLATE

from windlass import train
from windlass.commands.models.evaluate import evaluate
from windlass.commands.models.export import export
from windlass.commands.models.generate import generate
from windlass.commands.models.sampling import Sampling
from windlass.config import check_recipe
from windlass.data.tokenize.tokenizer import CONFIG_FILE, save_trained, train_tokenizer
from windlass.hardware import cpu_name
from windlass.training.preflight import prepare_only

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "use_of_the_prompt.json"
FACTORS = {"kind": "lora", "rank": 16, "alpha": 32}
ADAPTERS: dict[str, dict[str, Any]] = {"full": {}, "lora": FACTORS, "nf4": {**FACTORS, "base": "nf4"}}
Pair = tuple[str, str]
"""(prompt, answer)"""
Row = dict[str, Any]
"""Method and seed, and a score per held-out row: asked with its own prompt (`right`), with the next row's (`wrong`), and its own
by the model trained on shuffled pairs (`shuffled`)."""


class Size(NamedTuple):
    """Of an experiment's model and runs. A sequence holds one chat."""

    hidden_size: int
    layers: int
    vocabulary: int
    sequence_length: int
    base_rows: int
    """Sequences per step of pretraining."""
    base_steps: int
    base_rate: float
    rows: int
    steps: int
    rates: dict[str, float]
    """Learning rate of finetuning, by method."""


COPY = Size(128, 2, 257, 32, 60, 90, 4e-3, 16, 120, {"full": 2e-3, "lora": 1e-2})
SUMMARIES = Size(128, 3, 2048, 256, 8, 130, 4e-3, 8, 27, {"full": 1e-3, "lora": 4e-3, "nf4": 4e-3})
SEEDS = (0, 1, 2)
HELD_OUT = 256
"""Words that no run learns from."""
ANSWER = 250
"""Characters of a summary that are learned and scored: a sequence of 256 tokens has room for a piece of the transcript too."""
LINES = 20
"""Of the English text, per document."""


def words(count: int, seed: int) -> list[str]:
    """Different words of six letters."""
    draw, made = random.Random(seed), dict[str, None]()
    while len(made) < count:
        made["".join(draw.choices(string.ascii_uppercase, k=6))] = None
    return list(made)


def shuffled(pairs: list[Pair], seed: int) -> list[Pair]:
    """Every prompt with the answer of another row: the answers of a random cycle through all rows."""
    order = random.Random(seed).sample(range(len(pairs)), len(pairs))
    answer_of = dict(zip(order, [*order[1:], *order[:1]]))
    return [(prompt, pairs[answer_of[row]][1]) for row, (prompt, _) in enumerate(pairs)]


def wrong_prompts(pairs: list[Pair]) -> list[Pair]:
    """Every answer with the prompt of the next row."""
    return [(prompt, answer) for (prompt, _), (_, answer) in zip([*pairs[1:], *pairs[:1]], pairs)]


def matches(said: list[str], pairs: list[Pair]) -> list[int]:
    """1 for each text that is the answer, and nothing else."""
    return [int(text.strip() == answer) for text, (_, answer) in zip(said, pairs, strict=True)]


def write_chats(file: Path, pairs: list[Pair]) -> dict[str, str]:
    """-> the source of a recipe that reads them."""
    roles = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in pairs]
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in roles), "utf-8")
    return {"path": str(file), "format": "chat", "too_long": "cut-prompt"}


def write_texts(file: Path, texts: list[str]) -> dict[str, str]:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return {"path": str(file)}


def write_tokenizer(folder: Path, texts: Iterable[str], size: Size) -> None:
    save_trained(train_tokenizer(texts, size.vocabulary), folder / "tokenizer")
    config = folder / "tokenizer" / CONFIG_FILE
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))


def pretrain(folder: Path, source: dict[str, str], size: Size) -> None:
    """Writes the base model, a Hugging Face directory, to `base` of the folder."""
    sizes = {"hidden_size": size.hidden_size, "intermediate_size": 3 * size.hidden_size, "head_dim": 32}
    heads = size.hidden_size // 32
    model = {
        **sizes, "family": "qwen3", "num_hidden_layers": size.layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "max_position_embeddings": size.sequence_length, "rope_theta": 10000,
        "tie_word_embeddings": True, "initializer_range": size.hidden_size**-0.5,
    }  # fmt: skip
    tree = recipe(folder, "pretraining", source, size, size.base_steps, size.base_rate, size.base_rows)
    train(check_recipe({**tree, "model": model}), raise_on_stop=True)
    export(folder / "pretraining", folder / "base")


def finetune(folder: Path, name: str, source: dict[str, str], size: Size, method: str, seed: int) -> Path:
    """-> the run directory."""
    tree = recipe(folder, name, source, size, size.steps, size.rates[method], size.rows)
    tree["run"]["seed"] = seed
    tree["data"]["validation"] = {**source, "path": str(folder / "held_out.jsonl")}
    adapter = {"adapter": ADAPTERS[method]} if ADAPTERS[method] else {}
    tree |= {**adapter, "model": {"from": str(folder / "base")}, "objective": {"kind": "sft"}}
    train(check_recipe(tree), raise_on_stop=True)
    return folder / name


def recipe(
    folder: Path, name: str, source: dict[str, str], size: Size, steps: int, rate: float, rows: int
) -> dict[str, Any]:
    """The sections that all runs share."""
    tokens = rows * size.sequence_length
    return {
        "run": {"directory": str(folder / name), "steps": steps, "tokens_per_step": tokens, "micro_batch": rows},
        "data": {
            "sources": [source],
            "tokenizer": {"from": str(folder / "tokenizer")},
            "directory": str(folder / f"{Path(source['path']).stem}-data"),
            "sequence_length": size.sequence_length,
            "packing": "best-fit",
        },
        "optim": {"learning_rate": rate, "warmup_steps": steps // 10, "weight_decay": 0.0},
        "checkpoint": {"keep_last": 1},
        "evaluate": {"sequences": 16},
        "report": {"every_steps": 20},
    }


def compare(
    folder: Path,
    size: Size,
    seeds: Iterable[int],
    learned: list[Pair],
    test: list[Pair],
    score: Callable[[Path, str], Any],
) -> Iterator[Row]:
    """Rows of the base model, then of each method and seed. `score(model, "right" or "wrong")`: of the held-out rows, each asked
    with its own prompt or with the next row's."""
    base, right = folder / "base", write_chats(folder / "right.jsonl", learned)
    write_chats(folder / "held_out.jsonl", test)
    yield {"method": "base", "right": score(base, "right"), "wrong": score(base, "wrong")}
    for seed in seeds:
        control = write_chats(folder / f"shuffled-{seed}.jsonl", shuffled(learned, seed))
        for method in size.rates:
            own = finetune(folder, f"{method}-{seed}", right, size, method, seed)
            other = finetune(folder, f"{method}-{seed}-shuffled", control, size, method, seed)
            found = {"right": score(own, "right"), "wrong": score(own, "wrong"), "shuffled": score(other, "right")}
            yield {"method": method, "seed": seed, **found}


def copy(folder: Path, size: Size = COPY, seeds: Iterable[int] = SEEDS, count: int = 8_000) -> Iterator[Row]:
    """Rows of 0 or 1, whether the answer to a held-out word is that word. `count`: words to learn from."""
    made = words(count + HELD_OUT, 1)
    texts, pairs = [word + "." * 12 + word for word in made[HELD_OUT:]], [(word, word) for word in made]
    test, learned = pairs[:HELD_OUT], pairs[HELD_OUT:]
    write_tokenizer(folder, texts[:1], size)
    pretrain(folder, write_texts(folder / "texts.jsonl", texts), size)
    questions = {"right": test, "wrong": wrong_prompts(test)}

    def score(model: Path, name: str) -> list[int]:
        prompts = [prompt for prompt, _ in questions[name]]
        return matches(generate(model, prompts, Sampling(max_tokens=8, temperature=0), chat=True), questions[name])

    return compare(folder, size, seeds, learned, test, score)


def read_meetings(file: Path) -> list[Pair]:
    """As recipes/finetune/ami.py asks about them; the answer is the beginning of the summary."""
    conversation = runpy.run_path(str(ROOT / "recipes" / "finetune" / "ami.py"))["conversation"]
    chats = [conversation(json.loads(line))["messages"] for line in file.read_text("utf-8").splitlines() if line]
    return [(asked["content"], beginning(answer["content"])) for asked, answer in chats]


def beginning(text: str) -> str:
    """The first sentences, at least one, of at most ANSWER characters together."""
    ends = [one.end(1) for one in re.finditer(r"([.!?])(\s|$)", text)] or [len(text)]
    return text[: max([end for end in ends if end <= ANSWER] or ends[:1])]


def summaries(
    folder: Path, english: Path, meetings: Path, size: Size = SUMMARIES, seeds: Iterable[int] = SEEDS
) -> Iterator[Row]:
    """Rows of nats per answer token: a value per held-out meeting, in the file's order."""
    learned, test = (read_meetings(meetings / f"{name}.jsonl") for name in ("train", "validation"))
    write_tokenizer(folder, [english.read_text("utf-8"), *(text for pair in learned for text in pair)], size)
    lines = english.read_text("utf-8").splitlines()
    texts = ["\n".join(lines[at : at + LINES]) for at in range(0, len(lines), LINES)]
    pretrain(folder, write_texts(folder / "texts.jsonl", texts), size)
    sets = {
        f"{name}-{row}": write_chats(folder / f"{name}-{row}.jsonl", [pair])
        for name, pairs in (("right", test), ("wrong", wrong_prompts(test)))
        for row, pair in enumerate(pairs)
    }
    tree = recipe(folder, "scoring", write_chats(folder / "scoring.jsonl", learned), size, 1, 1e-3, rows=1)
    tree |= {"model": {"from": str(folder / "base")}, "objective": {"kind": "sft"}, "evaluate": {"sets": sets}}
    (folder / "scoring.yaml").write_text(json.dumps(tree))
    prepare_only(check_recipe(tree), with_weights=False)
    known = dict[Path, dict[str, float]]()

    def score(model: Path, name: str) -> list[float]:
        if model not in known:
            known[model] = {one.name: one.loss for one in evaluate(model, recipe=str(folder / "scoring.yaml"))}
        return [known[model][f"{name}-{row}"] for row in range(len(test))]

    return compare(folder, size, seeds, learned, test, score)


def record(name: str, found: Iterable[Row], size: Size) -> None:
    """Writes one experiment into RESULTS, row by row."""
    versions = {package: importlib.metadata.version(package) for package in ("torch", "tokenizers")}
    rows, threads = list[Row](), torch.get_num_threads()
    for row in found:
        rows.append(row)
        print({key: statistics.mean(held) if isinstance(held, list) else held for key, held in row.items()}, flush=True)
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        kept[name] = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{cpu_name()}, {threads} thread{'s' * (threads != 1)}",
            "versions": {"python": platform.python_version(), **versions},
            "size": size._asdict(),
            "rows": rows,
        }
        RESULTS.write_text(json.dumps(kept) + "\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        match sys.argv[1:]:
            case ["copy"]:
                record("copy", copy(Path(folder)), COPY)
            case ["summaries", english, meetings]:
                record("summaries", summaries(Path(folder), Path(english), Path(meetings)), SUMMARIES)
            case _:
                sys.exit(__doc__)


if __name__ == "__main__":
    main()
