"""Tokens per second that `windlass generate` and transformers' `generate` write, in turns, with the same model and its cache.

    python benchmarks/generation.py [--rounds 3] [--tokens 128] [--write]

One model for both: a Qwen3 of 18.9 million parameters from random weights in a Hugging Face directory, in fp32. A row is one
prompt or several of 64 ids, written together. Both take the likeliest token, stop at no token, and must write the same ids.
transformers has SDPA and its usual dynamic cache. A round runs both, in an order that turns; a rate is new tokens over wall
seconds, the median over the rounds, the spread is largest over smallest.

Threads sleep between operators, for both, as the command line lets them (GOMP_SPINCOUNT=1000). The load of the machine is
noted: figures of a busy one are no result, and --write refuses them.
"""

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch is imported
import torch
from throughput import QUIET_LOAD, SHAPE

from windlass.commands.models.generate import sample
from windlass.commands.models.sampling import Sampling
from windlass.hardware import cpu_name
from windlass.training.start.open_saved import open_saved

RESULTS = Path(__file__).parent / "results" / "generation.json"
PROMPTS, PROMPT_LENGTH = (1, 8), 64


def write_model(directory: Path, shape: dict[str, Any]) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(directory)


def writers(directory: Path, tokens: int) -> dict[str, Callable[[list[list[int]]], list[list[int]]]]:
    """Contender -> a function of prompts' ids that gives the new ids of each."""
    from transformers import AutoModelForCausalLM

    saved, theirs = open_saved(directory), AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    theirs.generation_config.eos_token_id = None

    def windlass(prompts: list[list[int]]) -> list[list[int]]:
        return sample(saved, prompts, set(), Sampling(max_tokens=tokens, temperature=0))

    def transformers(prompts: list[list[int]]) -> list[list[int]]:
        ids_BT = torch.tensor(prompts)
        mask_BT, options = torch.ones_like(ids_BT), {"do_sample": False, "pad_token_id": 0}
        found = theirs.generate(ids_BT, attention_mask=mask_BT, max_new_tokens=tokens, **options)
        return [row[ids_BT.shape[1] :] for row in found.tolist()]

    return {"windlass": windlass, "transformers": transformers}


def measure(num_prompts: int, rounds: int, tokens: int, shape: dict[str, Any]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(num_prompts)
    prompts = torch.randint(0, shape["vocab_size"], (num_prompts, PROMPT_LENGTH), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape)
        contenders = writers(Path(folder), tokens)
        written = {name: write(prompts) for name, write in contenders.items()}  # and warm
    if len({json.dumps(ids) for ids in written.values()}) != 1:
        raise RuntimeError(f"the contenders wrote different ids: {written}")
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: 1 if number % 2 else -1]:
            start_s = time.perf_counter()
            contenders[name](prompts)
            rates[name].append(num_prompts * tokens / (time.perf_counter() - start_s))
    middle = {name: statistics.median(found) for name, found in rates.items()}
    return {
        "tokens_per_s": {name: round(rate, 1) for name, rate in middle.items()},
        "spread": {name: round(max(found) / min(found), 3) for name, found in rates.items()},
        "windlass_over_transformers": round(middle["windlass"] / middle["transformers"], 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="new ones of each prompt")
    parser.add_argument("--write", action="store_true", help="write the rows, if the machine is quiet")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/generation.py --rounds {arguments.rounds} --tokens {arguments.tokens}",
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "load_at_start": round(load, 2)},
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "rows": {},
    }
    for num_prompts in PROMPTS:
        row = measure(num_prompts, arguments.rounds, arguments.tokens, SHAPE)
        result["rows"][f"{num_prompts} at once"] = row
        print(f"{num_prompts} at once: {row}", flush=True)
    if arguments.write and load > QUIET_LOAD:
        print(f"not written: load {load:.1f} at the start, above {QUIET_LOAD}", file=sys.stderr)
        return 1
    if arguments.write:
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
