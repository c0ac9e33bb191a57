"""What `windlass verify` found about one layout: the table that it prints, the first difference, and the JSON of all layouts."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from windlass.proof.compare import ProofRow, proof_row_as_json
from windlass.proof.fold_layout import Cell
from windlass.safe_text import shown, without_secrets


@dataclass
class Verdict:
    """The result of one cell. `failed`: what a rank raised, or ''."""

    cell: Cell
    rows: list[ProofRow] = field(default_factory=list)
    failed: str = ""
    against: str = "torch and transformers"
    elapsed_s: float = 0.0
    unproved: list[str] = field(default_factory=list)

    @property
    def first(self) -> ProofRow | None:
        """The first row that differs."""
        return next((row for row in self.rows if not row.agrees), None)

    @property
    def agrees(self) -> bool:
        return not self.failed and self.first is None


def print_verdict(verdict: Verdict, console: Console) -> None:
    """A cell's table, and the first that differs."""
    title = f"{verdict.cell.name}: {verdict.cell.world} ranks against {verdict.against}, {verdict.elapsed_s:.0f} s"
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("compared", "of"):
        table.add_column(heading)
    for heading in ("largest difference", "allowed"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in verdict.rows:
        word = "[green]equal[/green]" if row.agrees else "[red]differs[/red]"
        table.add_row(row.what, row.compared, f"{row.largest:.1e}", f"{row.allowed:.0e}", word)
    console.print(table)
    if verdict.failed:
        console.print(f"a rank failed:\n{shown(verdict.failed)}", markup=False)
    elif verdict.first is not None:
        console.print(f"first difference: {verdict.first.what}: {verdict.first.where}", markup=False, soft_wrap=True)
        tensors = [row for row in verdict.rows if not row.agrees and "weights" in row.what]
        if tensors and tensors[0] is not verdict.first:
            console.print(f"and then: {tensors[0].what}: {tensors[0].where}", markup=False, soft_wrap=True)


def conclude(verdicts: list[Verdict], unproved: list[str], console: Console) -> None:
    console.print("not proved:")
    for sentence in unproved:
        console.print(f"  - {sentence}", markup=False, soft_wrap=True)
    total = f"{len(verdicts)} layout{'s' * (len(verdicts) != 1)}"
    failed = sum(bool(verdict.failed) for verdict in verdicts)
    differ = sum(not verdict.failed and verdict.first is not None for verdict in verdicts)
    if differ:
        others = f", and {failed} ended because a rank failed" if failed else ""
        verb = "trains" if differ == 1 else "train"
        console.print(
            f"[red]not equal[/red]: {differ} of {total} {verb} something else than one process{others}", soft_wrap=True
        )
    elif failed:
        console.print(f"[red]not proved[/red]: {failed} of {total} ended because a rank failed", soft_wrap=True)
    else:
        verb = "trains" if len(verdicts) == 1 else "train"
        console.print(
            f"[green]proved[/green]: {len(verdicts)} of {total} {verb} what one process trains", soft_wrap=True
        )


def write(
    file: Path, recipe: str, overrides: list[str], verdicts: list[Verdict], unproved: list[str], agree: bool
) -> None:
    cells = [
        {
            "layout": verdict.cell.name,
            "world": verdict.cell.world,
            "against": verdict.against,
            "agrees": verdict.agrees,
            "first": proof_row_as_json(verdict.first) if verdict.first is not None else None,
            "failed": verdict.failed,
            "rows": [proof_row_as_json(row) for row in verdict.rows],
        }
        for verdict in verdicts
    ]
    content = {"recipe": recipe, "overrides": overrides, "agrees": agree, "cells": cells, "not_proved": unproved}
    file.write_text(json.dumps(without_secrets(content), indent=1) + "\n", "utf-8")
