"""Meetings as conversations: `python recipes/finetune/ami.py IN.jsonl OUT.jsonl`.

A row of IN has a transcript and its summary, under `transcript` (or `dialogue`, as in knkarthick/AMI on the hub) and `summary`. A
row of OUT is a conversation: the transcript is asked about, the summary is the answer, which alone is learned.
"""

import json
import sys
from pathlib import Path

QUESTION = "Summarise this meeting.\n\n"


def conversation(row: dict[str, str]) -> dict[str, list[dict[str, str]]]:
    asked = QUESTION + (row.get("transcript") or row["dialogue"]).strip()
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": row["summary"].strip()}]}


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = [conversation(json.loads(line)) for line in source.read_text("utf-8").splitlines() if line.strip()]
    target.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
