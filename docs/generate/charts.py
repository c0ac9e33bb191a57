"""Drawings made from what benchmarks/techniques.py counted: bars of bytes, and pipelines as they ran."""

from collections.abc import Mapping, Sequence
from typing import Any

from drawing import Canvas
from fill import idle_share, results

Row = Mapping[str, Any]
MIB = 1 << 20


def stacked(
    canvas: Canvas, top: float, rows: Sequence[tuple[str, dict[str, float]]], scale: float, left: float
) -> None:
    """A bar per row: colour -> length in units, `scale` pixels each, and the sum at its end."""
    for index, (name, parts) in enumerate(rows):
        x, y = left, top + 26 * index
        canvas.words(left - 8, y + 14, name, 12, "end")
        for colour, amount in parts.items():
            if amount:
                canvas.box(x, y, amount * scale, 19, colour)
            x += amount * scale
        canvas.words(x + 6, y + 14, f"{sum(parts.values()):.3g}", 12, "start", "faint")


def fullest(row: Row) -> dict[str, float]:
    """MiB by kind on the rank that holds most."""
    ranks = [
        {
            "parameters": rank["parameters"] + rank["gathered"],
            "gradients": max(rank["gradients"], rank["whole_gradients"]),
            "states": rank["states"],
            "kept": rank["kept"],
        }
        for rank in row["per_rank"]
    ]
    most = max(ranks, key=lambda rank: sum(rank.values()))
    return {colour: size / MIB for colour, size in most.items()}


def memory() -> Canvas:
    found = results()
    chosen = [
        ("one process", found["memory"]["one process"]),
        ("recompute: full", found["recompute"]["full"]),
        ("DDP, 4 ranks", found["ddp"]["DDP"]),
        *((f"{name}, 4 ranks", found["fsdp"][name]) for name in ("ZeRO-1", "ZeRO-2", "ZeRO-3")),
        ("tensor, 4 ranks", found["tensor"]["tp 4"]),
        ("tensor, recompute: full", found["tensor"]["tp 4, recompute: full"]),
        ("context, 4 ranks (ZeRO-1)", found["context"]["allgather"]),
        ("pipeline 1f1b, 4 ranks", found["pipeline"]["1f1b"]),
    ]
    rows = [(name, fullest(row)) for name, row in chosen]
    canvas = Canvas(760, 96 + 26 * len(rows), "What one rank holds, by layout")
    canvas.words(20, 28, "What one rank holds at most, in MiB (the fullest rank; counted)", 14, "start", bold=True)
    canvas.legend(
        20,
        54,
        {
            "parameters": "parameters, gathered ones too",
            "gradients": "gradients",
            "states": "optimizer states",
            "kept": "kept for backward",
        },
    )
    longest = max(sum(parts.values()) for _, parts in rows)
    stacked(canvas, 72, rows, 500 / longest, 190)
    return canvas


def recompute() -> Canvas:
    rows = [
        (name, {"kept": row["per_rank"][0]["kept"] / MIB, "sent": 0.0}) for name, row in results()["recompute"].items()
    ]
    work = {name: row["per_rank"][0]["flops"] / 1e9 for name, row in results()["recompute"].items()}
    canvas = Canvas(760, 250, "What 8 blocks keep, and what is computed again")
    canvas.words(20, 28, "Kept by 8 blocks for one micro-batch, in MiB (counted)", 14, "start", bold=True)
    stacked(canvas, 44, rows, 420 / max(parts["kept"] for _, parts in rows), 250)
    canvas.words(20, 174, "Matrix products of a step, in GFLOP (counted)", 14, "start", bold=True)
    least = min(work.values())
    for index, (name, flops) in enumerate(work.items()):
        x = 20 + 180 * index
        canvas.box(x, 190, 120 * least / max(work.values()), 16, "parameters")
        if flops > least:
            canvas.box(
                x + 120 * least / max(work.values()), 190, 120 * (flops - least) / max(work.values()), 16, "sent"
            )
        canvas.words(x, 224, f"{name.partition(',')[0] if index != 2 else 'budget'}: {flops:.3g}", 12, "start")
    return canvas


KIND_COLOURS = {"F": "parameters", "B": "gradients", "I": "gradients", "W": "states"}


def pipeline() -> Canvas:
    rows = {name: row for name, row in results()["pipeline"].items() if row["layout"] == {"pp": 4}}
    longest = max(action[4] for row in rows.values() for rank in row["timeline"] for action in rank)
    scale, lane, panel = 640 / longest, 17, 112
    canvas = Canvas(760, 50 + panel * len(rows), "Five schedules as they ran on 4 ranks")
    canvas.legend(
        20,
        28,
        {
            "parameters": "forward",
            "gradients": "backward, or its half that the stage before waits for",
            "states": "half for the weights",
        },
    )
    for index, (name, row) in enumerate(rows.items()):
        top = 66 + panel * index
        canvas.words(20, top, name, 13, "start", bold=True)
        canvas.words(740, top, f"idle {idle_share(row):.1%}", 12, "end", "faint")
        for rank, actions in enumerate(row["timeline"]):
            y = top + 8 + lane * rank
            canvas.words(20, y + 12, f"rank {rank}", 10.5, "start", "faint")
            canvas.box(70, y, longest * scale, lane - 2, "empty")
            for kind, _stage, chunk, start, end in actions:
                width = (end - start) * scale
                words = str(chunk) if width > 11 else ""
                canvas.box(70 + start * scale, y, width, lane - 2, KIND_COLOURS[kind], words, 9.5)
    return canvas


def precision() -> Canvas:
    rows = results()["precision"]
    whole = results()["memory"]["one process"]["per_rank"][0]["parameters"] // 4  # parameters, of 4 bytes there
    bars = []
    for name, row in rows.items():
        per = {
            kind: sum(rank[kind] for rank in row["per_rank"]) / whole for kind in ("parameters", "gradients", "states")
        }
        bars.append((name, per))
    canvas = Canvas(760, 330, "Where each dtype is used, and what a parameter costs")
    canvas.words(20, 28, "Policy bf16: one weight, from the shard and back", 14, "start", bold=True)
    steps = (
        ("parameters", "stored|fp32"),
        ("sent", "gathered|bf16"),
        ("kept", "multiplied|bf16"),
        ("kept", "gradient|bf16"),
        ("sent", "reduced|fp32"),
        ("gradients", "gradient|fp32"),
        ("states", "moments|fp32"),
    )
    for index, (colour, words) in enumerate(steps):
        canvas.box(20 + 104 * index, 44, 84, 42, colour, words)
        if index:
            canvas.arrow(20 + 104 * index - 19, 65, 20 + 104 * index - 2, 65)
    canvas.line([(686, 88), (686, 106), (62, 106), (62, 89)], arrow=True)
    canvas.words(374, 121, "the update, in fp32", 11, colour="faint")
    canvas.words(20, 152, "Bytes per parameter over all ranks (counted)", 14, "start", bold=True)
    stacked(canvas, 166, bars, 26, 160)
    canvas.legend(430, 152, {"parameters": "weights", "gradients": "gradients", "states": "moments"})
    return canvas
