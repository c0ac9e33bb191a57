"""Meetings as conversations, or as pairs: `python recipes/finetune/ami.py [--pairs] IN.jsonl OUT.jsonl`.

A row of IN has a transcript and its summary, under `transcript` (or `dialogue`, as in knkarthick/AMI on the hub) and `summary`. A
row of OUT is a conversation: the transcript is asked about, the summary is the answer, which alone is learned. With `--pairs` it
is a preference: the meeting's own summary is chosen, and that of the next meeting rejected.
"""

import json
import sys
from pathlib import Path
from typing import Any

QUESTION = "Summarise this meeting.\n\n"


def _asked(row: dict[str, str]) -> dict[str, str]:
    return {"role": "user", "content": QUESTION + (row.get("transcript") or row["dialogue"]).strip()}


def _answer(row: dict[str, str]) -> dict[str, str]:
    return {"role": "assistant", "content": row["summary"].strip()}


def conversation(row: dict[str, str]) -> dict[str, Any]:
    return {"messages": [_asked(row), _answer(row)]}


def pair(row: dict[str, str], other: dict[str, str]) -> dict[str, Any]:
    return {"prompt": [_asked(row)], "chosen": [_answer(row)], "rejected": [_answer(other)]}


if __name__ == "__main__":
    *options, source, target = sys.argv[1:]
    given = [json.loads(line) for line in Path(source).read_text("utf-8").splitlines() if line.strip()]
    nexts = [*given[1:], *given[:1]]
    rows = list(map(pair, given, nexts)) if options == ["--pairs"] else list(map(conversation, given))
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    Path(target).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
