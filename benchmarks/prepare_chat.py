"""How fast conversations become ids, in one process, by the number of turns and the template; what a preparation's parent does.

    python benchmarks/prepare_chat.py [--megabytes 2] [--templates DIRECTORY] [--write] [--parent | --harder | --rival]

The conversations hold words drawn from the sources of Python's standard library: a system message, and turns of a question of 200
characters and an answer of 800. The tokenizer is a byte-level BPE of 16,384 tokens trained on the same. The templates are TRL's
(in its package, which the tests install): Qwen2.5, Qwen3 and Llama 3. Encoded are about as many megabytes for 4, 16 and 64 turns,
with tiktoken and with the tokenizer itself, and compared with nothing: a rate of CPU seconds and the counts behind it.

Counted: texts that the template rendered, per turn, and their characters, per character of the conversations. Both say whether
the cost is linear in turns, whatever the machine.
Wanted: 2 MB per CPU second with tiktoken, and as much with 64 turns as with 4.

--harder measures two cases that cost more, with tiktoken, and adds them to the results: turns of 60 and 90 characters (Qwen2.5),
where rendering costs more than encoding; and a template that drops earlier reasoning (DeepSeek R1's distils), where every answer
is a sample of its own that begins with the whole history. Nothing is wanted of them.

--rival measures beside it what TRL does with a row for `assistant_only_loss`: transformers' `apply_chat_template` with TRL's own
template, which marks answers, and the mask of their tokens. In turns, three times each, by its own CPU seconds; `over` is the
ratio of each turn.

--parent measures something else: `prepare` itself, with two workers, on --megabytes of such conversations of 16 turns (Qwen2.5,
tiktoken, sequences of 16,384 tokens), in a process of its own. Of its CPU seconds `parent_share` is the parent's, and
`parent_share_less_fixed` is that without what comes before the first shard: imports, the tokenizer, its comparison with tiktoken.
Shares hold on a busy machine too; seconds are not kept. --write adds them to the results, with the load.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "prepare_chat.json"
VOCABULARY = 16_384
TEMPLATES = {
    "qwen2_5": "<|im_start|> <|im_end|>",
    "qwen3": "<|im_start|> <|im_end|>",
    "llama3": "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
}
TURNS = (4, 16, 64)
WANTED_MB = 2.0
USUAL, SHORT = (200, 800), (60, 90)
"""Characters of a question and of an answer."""
HARDER = {
    "short turns, qwen2_5": ("qwen2_5", SHORT),
    "an answer a sample, deepseek_r1_distill": ("deepseek_r1_distill", USUAL),
}
DEEPSEEK = "<｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜>"


def read_words() -> list[str]:
    from windlass.data.config import SourceConfig
    from windlass.data.sources.scan import scan

    files = list(scan(SourceConfig(builtin="python-stdlib"), lambda line: None))[:200]
    return " ".join(Path(file.path).read_text("utf-8", "ignore") for file in files).replace("<|", "").split()


def conversations(words: list[str], num_turns: int, num_bytes: int, characters: tuple[int, int] = USUAL) -> list[str]:
    """As `conversation_of` writes them."""
    draw = random.Random(num_turns)
    rows, found = list[str](), 0

    def said(num_chars: int) -> str:
        start = draw.randrange(len(words) - num_chars)
        return " ".join(words[start : start + num_chars])[:num_chars].strip()

    while found < num_bytes:
        messages = [{"role": "system", "content": "You answer at length, and to the point."}]
        for _ in range(num_turns):
            messages.append({"role": "user", "content": said(characters[0])})
            messages.append({"role": "assistant", "content": said(characters[1])})
        rows.append(json.dumps(messages, ensure_ascii=False))
        found += len(rows[-1].encode())
    return rows


def write_tokenizer(words: list[str], directory: Path, template: Path, specials: list[str]) -> None:
    from tokenizers import AddedToken, Tokenizer

    from windlass.data.tokenize.tokenizer import save_trained, train_tokenizer

    chunks = (" ".join(words[at : at + 1000]) for at in range(0, len(words), 1000))
    save_trained(train_tokenizer(chunks, VOCABULARY), directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in specials])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = directory / "tokenizer_config.json"
    changes = {"bos_token": specials[0], "eos_token": specials[-1], "chat_template": template.read_text("utf-8")}
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))


def measure(directory: Path, rows: list[str], num_turns: int, *, is_fast: bool) -> dict[str, float]:
    from windlass.data.tokenize.encode_rows import RowEncoder, RowSettings, row_batches

    encoder = RowEncoder(RowSettings(directory, "train", is_fast=is_fast))
    encoder([(0, rows[0])])  # compiles the template
    template = encoder._template
    before = template.num_rendered, template.chars_rendered
    start_s = time.process_time()
    num_ids = sum(len(encoder(batch).ids) for batch in row_batches(rows))
    cpu_s = time.process_time() - start_s
    num_bytes, num_chars = sum(len(row.encode()) for row in rows), sum(map(len, rows))
    return {
        "conversations": len(rows),
        "tokens": num_ids,
        "mb_per_cpu_s": round(num_bytes / 1e6 / cpu_s, 2),
        "rendered_per_turn": round((template.num_rendered - before[0]) / len(rows) / num_turns, 3),
        "chars_rendered_per_char": round((template.chars_rendered - before[1]) / num_chars, 3),
    }


def measure_harder(words: list[str], templates: Path, megabytes: float) -> dict[str, Any]:
    found = {}
    for name, (template, characters) in HARDER.items():
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder, "tokenizer")
            specials = TEMPLATES.get(template, DEEPSEEK).split()
            write_tokenizer(words, directory, templates / f"{template}.jinja", specials)
            for num_turns in TURNS:
                rows = conversations(words, num_turns, int(megabytes * 1e6), characters)
                found[f"{name}, {num_turns} turns"] = measure(directory, rows, num_turns, is_fast=True)
    return found


def measure_rival(words: list[str], templates: Path, megabytes: float) -> dict[str, Any]:
    from transformers import AutoTokenizer

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder, "ours"), Path(folder, "theirs")
        for directory, template in ((ours, "qwen2_5"), (theirs, "qwen2_5_training")):
            write_tokenizer(words, directory, templates / f"{template}.jinja", TEMPLATES["qwen2_5"].split())
        tokenizer = AutoTokenizer.from_pretrained(theirs)
        for num_turns in TURNS:
            rows, rates = conversations(words, num_turns, int(megabytes * 1e6)), dict[str, list[float]]()
            for turn in range(3):
                for way in ("theirs", "tiktoken", "tokenizers")[:: 1 if turn % 2 else -1]:
                    if way == "theirs":
                        rate = rate_of(tokenizer, rows)
                    else:
                        rate = measure(ours, rows, num_turns, is_fast=way == "tiktoken")["mb_per_cpu_s"]
                    rates.setdefault(way, []).append(rate)
            over = [round(one / other, 2) for one, other in zip(rates["tiktoken"], rates["theirs"], strict=True)]
            found[f"{num_turns} turns"] = {**rates, "over": over}
    return found


def rate_of(tokenizer: Any, rows: list[str]) -> float:
    """MB per CPU second of transformers' ids and mask of answers."""
    start_s = time.process_time()
    for row in rows:
        given = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = tokenizer.apply_chat_template(json.loads(row), **given)
        assert any(found["assistant_masks"])
    return round(sum(len(row.encode()) for row in rows) / 1e6 / (time.process_time() - start_s), 2)


def run_prepare(rows: Path, tokenizer: Path, place: Path) -> None:
    """Prints the shares, as JSON, on the last line."""
    from windlass.data.config import DataConfig
    from windlass.data.prepare import build, prepare

    begun: list[float] = []
    real = build.write_set

    def noted(*arguments: Any, **keywords: Any) -> Any:
        begun.append(time.process_time())
        return real(*arguments, **keywords)

    build.write_set = noted
    source = {"path": str(rows), "format": "chat"}
    settings = {"sources": [source], "tokenizer": {"from": str(tokenizer)}, "directory": str(place), "workers": 2}
    config = DataConfig.model_validate({**settings, "sequence_length": 16_384, "packing": "best-fit"})
    prepare.prepare(config, {}, log=lambda line: print(line, file=sys.stderr))
    now = os.times()
    own, every = sum(now[:2]), sum(now[:4])
    print(
        json.dumps(
            {"parent_share": round(own / every, 4), "parent_share_less_fixed": round((own - begun[0]) / every, 4)}
        )
    )


def measure_parent(words: list[str], template: Path, megabytes: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, rows = Path(folder, "tokenizer"), Path(folder, "rows.jsonl")
        write_tokenizer(words, tokenizer, template, TEMPLATES["qwen2_5"].split())
        texts = conversations(words, 16, int(megabytes * 1e6))
        rows.write_text("".join(f'{{"messages": {text}}}\n' for text in texts), "utf-8")
        command = [sys.executable, __file__, "--way", str(rows), str(tokenizer), str(Path(folder, "place"))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return {"megabytes": megabytes, "conversations": len(texts), **json.loads(done.stdout.splitlines()[-1])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=2.0)
    parser.add_argument("--templates", type=Path, help="a directory of NAME.jinja, instead of TRL's")
    parser.add_argument("--write", action="store_true", help="write the results, with the machine and its load")
    parser.add_argument("--parent", action="store_true", help="measure the parent's share of a preparation instead")
    parser.add_argument(
        "--harder", action="store_true", help="measure short turns, and answers that are samples, instead"
    )
    parser.add_argument("--rival", action="store_true", help="measure what TRL does with a row beside it instead")
    parser.add_argument("--way", nargs=3, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way is not None:
        run_prepare(*arguments.way)
        return 0
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in a worker
    spec = find_spec("trl")
    origin = None if spec is None or spec.origin is None else Path(spec.origin).parent / "chat_templates"
    templates = arguments.templates or origin
    if templates is None:
        raise SystemExit("install trl, or give --templates")
    if arguments.parent or arguments.harder or arguments.rival:
        load = [round(one, 2) for one in os.getloadavg()]
        if arguments.parent:
            name, found = f"parent, {arguments.megabytes:g} MB", dict[str, Any]()
            found |= measure_parent(read_words(), templates / "qwen2_5.jinja", arguments.megabytes)
        else:
            name = "harder" if arguments.harder else "rival"
            made = measure_harder if arguments.harder else measure_rival
            found = made(read_words(), templates, arguments.megabytes)
        found |= {"load_at_start": load, "cores": os.cpu_count(), "python": platform.python_version()}
        print(json.dumps(found, indent=1))
        if arguments.write:
            kept = json.loads(RESULTS.read_text())
            RESULTS.write_text(json.dumps({**kept, name: found}, indent=2) + "\n")
        return 0
    machine = {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()}
    result: dict[str, Any] = {
        **machine,
        "load_at_start": [round(one, 2) for one in os.getloadavg()],
        "vocabulary": VOCABULARY,
    }
    words, least = read_words(), float("inf")
    for name, specials in TEMPLATES.items():
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder, "tokenizer")
            write_tokenizer(words, directory, templates / f"{name}.jinja", specials.split())
            for num_turns in TURNS:
                rows = conversations(words, num_turns, int(arguments.megabytes * 1e6))
                for is_fast in (True, False):
                    way = f"{name}, {num_turns} turns, {'tiktoken' if is_fast else 'tokenizers'}"
                    result[way] = measure(directory, rows, num_turns, is_fast=is_fast)
                    least = min(least, result[way]["mb_per_cpu_s"]) if is_fast else least
                    print(f"{way}: {result[way]}", flush=True)
    result["load_at_end"] = [round(one, 2) for one in os.getloadavg()]
    if arguments.write:
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        others = {name: row for name, row in kept.items() if name.startswith(("parent", "harder", "rival"))}
        RESULTS.write_text(json.dumps(result | others, indent=2) + "\n")
    return 0 if least >= WANTED_MB else 1


if __name__ == "__main__":
    sys.exit(main())
