"""What the proxy model learns: short documents, or pairs of answers, of random letters."""

import json
import random
import string
from pathlib import Path
from typing import Final

DOCUMENTS: Final = 160


def write_text(directory: Path) -> None:
    """Short documents of random letters of many scripts, the same every time: nearly every byte occurs."""
    draw = random.Random(7)
    letters = [chr(code) for start in range(0x41, 0xC000, 0x1F3) for code in range(start, start + 4)]
    directory.mkdir(parents=True)
    for number in range(DOCUMENTS):
        text = "".join(draw.choice(letters) + " " * (draw.random() < 0.2) for _ in range(draw.randint(2, 40)))
        (directory / f"{number:03d}.txt").write_text(text, "utf-8")


def write_pairs(directory: Path) -> None:
    """Two short answers of uneven length to prompts of random letters, the same every time."""
    draw = random.Random(7)
    letters = string.ascii_letters + string.digits

    def say(most: int) -> str:
        return "".join(draw.choices(letters, k=draw.randint(1, most)))

    rows = [{"prompt": say(4), "chosen": f" {say(5)}", "rejected": f"-{say(6)}"} for _ in range(DOCUMENTS)]
    directory.mkdir(parents=True)
    (directory / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
