"""What each layout of recipes/finetune keeps and sends: one model, the same data and batch. The table of docs/howto/finetune.md.

    python benchmarks/finetune.py

Every recipe is trained for 3 steps as its tiny proxy: its adapter, layout and precision as they are, on a Qwen3 of 0.2 million
parameters with random weights, on conversations that this script makes. technique_meter counts in every rank, on gloo ranks of
this machine: counts follow from shapes, and no time is measured. The last loss shows what the layouts of one adapter share.

Results are written to benchmarks/results/finetune.json.
"""

import datetime
import importlib.metadata
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from meters.technique_meter import measure

from windlass.config import RunConfig, load_recipe
from windlass.data.tokenize.tokenizer import CONFIG_FILE, save_trained, train_tokenizer
from windlass.proof.pool import Ranks
from windlass.training.preflight import make_ready

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes" / "finetune"
RESULTS = ROOT / "benchmarks" / "results" / "finetune.json"
WORDS = ["meeting", "remote", "control", "button", "the", "a", "of", "price", "design", "market", "slow", "and", "team"]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}\n{{ message.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
WORLD = {"nf4-one-process": 1}  # the others on 2 ranks


def world_of(name: str) -> int:
    return WORLD.get(name, 2)


def write_twin(folder: Path) -> None:
    """A base model with its tokenizer, and conversations: all that the recipes name of the hub and of the disk."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    draw = random.Random(7)

    def words(most: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(4, most)))

    rows = [
        {"messages": [{"role": "user", "content": words(30)}, {"role": "assistant", "content": words(8)}]}
        for _ in range(120)
    ]
    for name, part in (("train", rows[:108]), ("validation", rows[108:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        pairs = [{"prompt": words(20), "chosen": f" {words(8)}", "rejected": f" {words(8)}"} for _ in part]
        (folder / f"pairs-{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    made = train_tokenizer((message["content"] for row in rows for message in row["messages"]), 300)
    save_trained(made, folder / "base")
    config = folder / "base" / CONFIG_FILE
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    torch.manual_seed(5)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=300, max_position_embeddings=128, **sizes, **heads))
    model.save_pretrained(folder / "base")


def proxy_of(name: str, folder: Path, *changes: str) -> RunConfig:
    """A recipe on what `write_twin` wrote, 3 steps of 8 sequences."""
    is_pairs = name.startswith("dpo")
    rows = "format: preference" if is_pairs else "format: chat, too_long: cut-prompt"
    train_file, validation_file = (folder / f"{'pairs-' * is_pairs}{kind}.jsonl" for kind in ("train", "validation"))
    ours = (
        f"run.directory={folder / name}",
        "run.epochs=null",
        "run.steps=3",
        "run.tokens_per_step=512",
        f"model.from={folder / 'base'}",
        f"data.sources=[{{path: {train_file}, {rows}}}]",
        f"data.validation={{path: {validation_file}, {rows}}}",
        f"data.tokenizer.from={folder / 'base'}",
        f"data.directory={folder / ('pairs' if is_pairs else 'data')}",
        "data.sequence_length=64",
        "optim.warmup_steps=0",
    )
    return load_recipe(str(RECIPES / f"{name}.yaml"), *ours, *changes)


def count(ranks: Ranks, name: str, folder: Path) -> dict[str, Any]:
    """One recipe: the losses, and what each of its ranks counted."""
    world = world_of(name)
    config = make_ready(proxy_of(name, folder), world, "cpu").config
    found = ranks.run(world, measure, config, timeout_s=600)
    losses = [one.pop("losses") for one in found]
    for one in found:
        one.pop("log", None)
    return {"ranks": world, "losses": losses[0], "per_rank": found}


def main() -> None:
    ranks, rows = Ranks(), {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_twin(folder)
        for name in sorted(path.stem for path in RECIPES.glob("*.yaml")):
            rows[name] = count(ranks, name, folder)
            print(f"{name}: loss {rows[name]['losses'][-1]:.6f}", flush=True)
    ranks.close()
    head = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/finetune.py",
        "versions": {"torch": importlib.metadata.version("torch")},
        "unit": "bytes, of one training step, per rank; counted, not timed",
    }
    body = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    RESULTS.write_text(json.dumps(head, indent=1)[:-2] + f',\n "recipes": {{\n{body}\n }}\n}}\n')


if __name__ == "__main__":
    main()
