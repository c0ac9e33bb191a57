"""The results file of a script, and its rows as a table.

    {"script", "runs": {date: where, when and with what}, "cells": [{"name", "device", "torch", "run", "status", ...}]}

A row is one cell on one device with one torch; it replaces the one it repeats, and those of other devices stay. The file is
written whole after every row: a draft that is renamed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Book:
    """A results file: {"script", "runs": {date: describe()}, "cells": [row]}. Written whole after every row."""

    def __init__(self, path: Path, script: str, run: dict[str, Any]):
        self.path, self.run = path, run
        self.content: dict[str, Any] = {"script": script, "runs": {}, "cells": []}
        if path.exists():
            self.content = json.loads(path.read_text())
            kinds = {(one["device_type"], one["trial"]) for one in self.content["runs"].values()}
            if self.content["script"] != script or not kinds <= {(run["device_type"], run["trial"])}:
                raise SystemExit(
                    f"{path} holds {self.content['script']} of {sorted(kinds)}: name another file by --out"
                )

    def rows(self) -> dict[str, dict[str, Any]]:
        """What is known of this device with this torch: name -> row."""
        mine = [row for row in self.content["cells"] if (row["device"], row["torch"]) == self._place()]
        return {row["name"]: row for row in mine}

    def add(self, row: dict[str, Any]) -> None:
        """Puts a row in the place of the one it repeats, and writes the file."""
        device, version = self._place()
        row = {"name": row.pop("name"), "device": device, "torch": version, "run": self.run["date"]} | row
        key = (row["name"], device, version)
        cells = [old for old in self.content["cells"] if (old["name"], old["device"], old["torch"]) != key]
        self.content["cells"] = [*cells, row]
        used = {one["run"] for one in self.content["cells"]}
        runs = self.content["runs"] | {self.run["date"]: self.run}
        self.content["runs"] = {date: run for date, run in runs.items() if date in used}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(self.content, indent=1, allow_nan=False) + "\n")
        draft.replace(self.path)

    def _place(self) -> tuple[str, str]:
        return self.run["device"], self.run["torch"]


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as they must be; numbers to the right."""
    cells = [list(header), *([_shown(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    print(f"\n{title}")
    for row in cells:
        print(
            "  "
            + "  ".join(text.ljust(w) if at == 0 else text.rjust(w) for at, (text, w) in enumerate(zip(row, widths)))
        )


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
