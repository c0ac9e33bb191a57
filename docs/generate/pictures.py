"""The drawings of docs/techniques/: those made from counts (charts.py), those of finetuning (finetuning.py), and those of
how a layout works, laid out here."""

from collections.abc import Callable
from pathlib import Path

import charts
import finetuning
from drawing import Canvas

TECHNIQUES = Path(__file__).parents[1] / "techniques"


def decision() -> Canvas:
    """The decision tree: questions on the left, answers on the right."""
    steps = (
        ("Does one step fit on one device?|weights, gradients, states, activations", "a throughput problem: see below"),
        ("Is it activations that do not fit?", "smaller micro_batch; recompute: selective, full"),
        (
            "Is it gradients and states, of a trained|model that you finetune?",
            "LoRA; if weights do not fit either, base: nf4",
        ),
        ("Is it weights and states?", "shard over all ranks: ZeRO-3 (HSDP over nodes)"),
        ("Is one block too large, gathered, or does the|batch not divide over more ranks?", "tp, inside a node"),
        ("Do ranks span slow links, or is the model|too deep for what is left?", "pp, over nodes"),
        ("Is one sequence too long?", "context"),
        ("Is it experts?", "expert"),
    )
    canvas = Canvas(760, 138 + 58 * len(steps), "Which layout")
    canvas.words(20, 28, "Memory: the first yes answers, then ask again", 14, "start", bold=True)
    for index, (question, answer) in enumerate(steps):
        y = 44 + 58 * index
        canvas.box(20, y, 330, 42, "empty" if index else "data", question)
        canvas.arrow(350, y + 21, 408, y + 21)
        canvas.words(379, y + 15, "yes", 11, colour="faint")
        canvas.box(412, y, 328, 42, "states" if index else "data", answer)
        if index + 1 < len(steps):
            canvas.arrow(60, y + 42, 60, y + 57)
            canvas.words(68, y + 54, "no", 10.5, "start", "faint")
    y = 58 + 58 * len(steps)
    canvas.words(20, y, "Throughput: it fits, and should be faster", 14, "start", bold=True)
    last = (
        "the whole model fits|DDP (zero: 0)",
        "ZeRO-3 fits, gathers wait|ZeRO-2, or a larger micro_batch",
        "one sample per rank, fast links|tp",
    )
    for index, words in enumerate(last):
        canvas.box(20 + 245 * index, y + 14, 230, 46, "parameters", words)
    return canvas


def ddp() -> Canvas:
    canvas = Canvas(760, 350, "DDP: whole copies, summed gradients")
    for rank, x in ((0, 20), (1, 400)):
        canvas.words(x, 30, f"rank {rank}", 13, "start", bold=True)
        canvas.box(x, 42, 90, 96, "data", "its samples|of the batch")
        canvas.arrow(x + 90, 90, x + 116, 90)
        canvas.box(x + 120, 42, 100, 44, "parameters", "the whole|model")
        canvas.box(x + 120, 94, 100, 44, "gradients", "its gradients")
        canvas.box(x + 240, 42, 100, 44, "states", "whole states")
        canvas.box(x + 240, 94, 100, 44, "gradients", "summed over|all ranks")
        canvas.arrow(x + 220, 116, x + 237, 116)
    canvas.line([(190, 140), (190, 156), (570, 156), (570, 141)])
    canvas.words(380, 172, "all-reduce: one per bucket", 12)
    canvas.words(20, 206, "one rank, last micro-batch of a step", 13, "start", bold=True)
    for y, name in ((218, "backward"), (252, "all-reduce"), (286, "update")):
        canvas.words(88, y + 18, name, 11.5, "end", "faint")
        canvas.box(96, y, 644, 26, "card")
    x = 96
    for words, width in (("head", 60), ("block 7", 66), ("6", 66), ("5", 66), ("4", 66), ("3", 66), ("2 .. 0", 100)):
        canvas.box(x, 218, width, 26, "gradients", words, 11)
        x += width
    for x, width, words in ((222, 104, "bucket 1"), (354, 104, "bucket 2"), (586, 76, "bucket 3")):
        canvas.box(x, 252, width, 26, "sent", words, 11)
        canvas.arrow(x, 245, x, 252)
    canvas.box(664, 286, 76, 26, "states", "step", 11)
    canvas.words(
        20, 336, "A bucket leaves when the last gradient in it is there; backward goes on meanwhile.", 12, "start"
    )
    return canvas


def fsdp() -> Canvas:
    canvas = Canvas(760, 392, "FSDP: shards, gathered unit by unit")
    canvas.words(20, 28, "kept between steps: a quarter of every unit", 13, "start", bold=True)
    units = ("root", "block 0", "block 1", "block 2")
    for row, unit in enumerate(units):
        canvas.words(88, 56 + 26 * row, unit, 11.5, "end", "faint")
        for rank in range(4):
            x = 96 + 150 * rank
            for part, (colour, width) in enumerate((("parameters", 36), ("gradients", 36), ("states", 64))):
                canvas.box(x + (0, 37, 74)[part], 42 + 26 * row, width, 22, colour)
    for rank in range(4):
        canvas.words(96 + 150 * rank + 69, 164, f"rank {rank}", 12)
    canvas.legend(470, 28, {"parameters": "parameters", "gradients": "gradients", "states": "states"})
    canvas.words(20, 196, "one rank, one micro-batch, zero: 3", 13, "start", bold=True)
    lanes = (("gather", 208), ("compute", 240), ("reduce-scatter", 272), ("whole units", 304))
    for name, y in lanes:
        canvas.words(108, y + 17, name, 11.5, "end", "faint")
        canvas.box(116, y, 624, 26, "card")
    blank = ("",)
    timeline = {
        208: ("root", "0", "1", "2", *blank, "2", "1", "0"),
        240: (*blank, *blank, "0", "1", "2", "head", "2", "1", "0", "root"),
        272: (*blank * 7, "2", "1", "0", "root"),
        304: (*blank, "r", "r 0", "r 1", "r 2", "r", "r 2", "r 1", "r 0", "r"),
    }
    for y, slots in timeline.items():
        for slot, words in enumerate(slots):
            forward = "parameters" if slot < 5 else "kept" if slot == 5 else "gradients"
            colour = {208: "sent", 240: forward, 272: "sent", 304: "empty"}[y]
            if words:
                canvas.box(116 + 56 * slot, y, 52, 26, colour, words, 11)
    canvas.words(
        20, 352, "Forward frees a block behind it; backward gathers it again, one ahead; the root stays.", 12, "start"
    )
    canvas.words(
        20, 368, "zero: 2 frees nothing until the last micro-batch; zero: 1 reduces nothing before it.", 12, "start"
    )
    return canvas


def tensor() -> Canvas:
    canvas = Canvas(760, 330, "Tensor and sequence parallelism in one block")
    canvas.words(20, 28, "half a block (attention, or the MLP) on 2 ranks", 13, "start", bold=True)
    canvas.legend(470, 28, {"parameters": "weights", "kept": "activations", "sent": "sent"})
    for rank, y in ((0, 50), (1, 176)):
        canvas.words(20, y + 54, f"rank {rank}", 12, "start", bold=True)
        canvas.box(
            66,
            y + 52 * rank,
            62,
            50,
            "kept",
            f"stream|T/2 x D|{'first' if rank == 0 else 'second'} half",
            10,
        )
        canvas.box(66, y + 52 * (1 - rank), 62, 50, "card")
        canvas.arrow(130, y + 51, 144, y + 51)
        canvas.box(146, y + 26, 48, 50, "parameters", "norm|whole", 10.5)
        canvas.arrow(196, y + 51, 210, y + 51)
        canvas.arrow(242, y + 51, 256, y + 51)
        canvas.box(258, y, 62, 102, "kept", "T x D|all|positions", 10.5)
        canvas.arrow(322, y + 51, 336, y + 51)
        canvas.box(338, y, 66, 102, "parameters", "columns:|q k v|gate up|half of the|features", 10.5)
        canvas.arrow(406, y + 51, 420, y + 51)
        canvas.box(422, y, 58, 102, "kept", "half the|heads or|channels", 10.5)
        canvas.arrow(482, y + 51, 496, y + 51)
        canvas.box(498, y, 62, 102, "parameters", "rows:|o, down", 10.5)
        canvas.arrow(562, y + 51, 576, y + 51)
        canvas.box(578, y, 56, 102, "empty", "T x D|a part of|the sum", 10.5)
        canvas.arrow(636, y + 51, 650, y + 51)
        canvas.arrow(682, y + 51, 694, y + 51)
        canvas.box(696, y + 52 * rank, 48, 50, "kept", "T/2 x D|+ stream", 10)
        canvas.box(696, y + 52 * (1 - rank), 48, 50, "card")
    canvas.box(212, 44, 30, 240, "sent", "G|A|T|H|E|R", 11)
    canvas.box(652, 44, 30, 240, "sent", "S|C|A|T|T|E|R", 11)
    caption = "GATHER puts all positions together; SCATTER adds the parts and leaves each rank its positions."
    canvas.words(20, 312, f"{caption} Each is the other's backward.", 11, "start")
    return canvas


def context() -> Canvas:
    canvas = Canvas(760, 420, "Context parallelism: who holds what of a row")
    canvas.words(20, 28, "a row of T positions in 8 slices, on 4 ranks", 13, "start", bold=True)
    colours = ("parameters", "gradients", "states", "kept")
    for part in range(8):
        rank = min(part, 7 - part)
        canvas.box(20 + 56 * part, 40, 54, 28, colours[rank], f"slice {part}", 11)
    canvas.legend(440, 28, {colour: f"rank {rank}" for rank, colour in enumerate(colours)})
    canvas.words(20, 98, "what its queries see under the causal mask", 13, "start", bold=True)
    for query in range(8):
        y = 110 + 17 * query
        canvas.words(62, y + 12, f"query {query}", 10, "end", "faint")
        for key in range(8):
            seen = key <= query
            canvas.box(68 + 30 * key, y, 28, 15, colours[min(query, 7 - query)] if seen else "card")
    lines = (
        "Rank 0 has slices 0 and 7, which see 1/2 and 7 1/2",
        "slices of keys; rank 3 has 3 and 4: 3 1/2 and 4 1/2.",
        "Together 8 on every rank. Cut into quarters, the last",
        "rank would do 7 times the first one's work.",
    )
    for index, line in enumerate(lines):
        canvas.words(336, 128 + 20 * index, line, 12, "start")
    canvas.words(20, 276, "allgather: all keys and values to all", 13, "start", bold=True)
    canvas.words(390, 276, "ulysses: positions for heads, and back", 13, "start", bold=True)
    for rank, colour in enumerate(colours):
        y = 288 + 30 * rank
        canvas.box(20, y, 60, 24, colour, "k v", 11)
        canvas.arrow(82, y + 12, 98, y + 12)
        canvas.arrow(130, y + 12, 146, y + 12)
        canvas.box(148, y, 118, 24, "empty", "k v of all positions", 10)
        canvas.arrow(268, y + 12, 282, y + 12)
        canvas.box(284, y, 76, 24, colour, "own queries", 10)
        canvas.box(390, y, 72, 24, colour, "1/4 T, all H", 10)
        canvas.arrow(464, y + 12, 476, y + 12)
        canvas.arrow(506, y + 12, 518, y + 12)
        canvas.box(520, y, 86, 24, "empty", "all T, H/4 heads", 10)
        canvas.arrow(608, y + 12, 620, y + 12)
        canvas.arrow(650, y + 12, 662, y + 12)
        canvas.box(664, y, 76, 24, colour, "1/4 T, all H", 10)
    for x, words in ((100, "G|A|T|H|E|R"), (478, "A|2|A"), (622, "A|2|A")):
        canvas.box(x, 286, 28, 118, "sent", words, 11)
    return canvas


def expert() -> Canvas:
    canvas = Canvas(760, 352, "Expert parallelism: rows travel to their experts")
    canvas.words(20, 28, "4 experts on 2 ranks; each token goes to 2 of them", 13, "start", bold=True)
    canvas.legend(430, 28, {"data": "rows", "parameters": "weights", "sent": "sent", "kept": "activations"})
    for rank, y in ((0, 46), (1, 158)):
        canvas.words(20, y + 54, f"rank {rank}", 12, "start", bold=True)
        canvas.box(70, y + 22, 60, 62, "kept", "its own|tokens", 11)
        canvas.arrow(132, y + 53, 146, y + 53)
        canvas.box(148, y + 28, 60, 50, "parameters", "router", 11)
        canvas.arrow(210, y + 53, 224, y + 53)
        for expert, rows in enumerate(("for 0", "for 1", "for 2", "for 3")):
            canvas.box(226, y + 5 + 25 * expert, 62, 22, "data", rows, 10)
        canvas.arrow(290, y + 53, 302, y + 53)
        canvas.arrow(336, y + 53, 348, y + 53)
        for place, own in enumerate((2 * rank, 2 * rank + 1)):
            canvas.box(350, y + 5 + 50 * place, 92, 46, "data", f"for {own}, from|both ranks", 10)
            canvas.arrow(444, y + 28 + 50 * place, 456, y + 28 + 50 * place)
            canvas.box(458, y + 5 + 50 * place, 76, 46, "parameters", f"expert {own}", 11)
        canvas.arrow(536, y + 53, 548, y + 53)
        canvas.arrow(582, y + 53, 594, y + 53)
        canvas.box(596, y + 22, 62, 62, "data", "own rows,|answered", 11)
        canvas.arrow(660, y + 53, 672, y + 53)
        canvas.box(674, y + 22, 66, 62, "kept", "sum by|weights", 11)
    for x in (304, 550):
        canvas.box(x, 46, 30, 218, "sent", "A|L|L|||T|O|||A|L|L", 11)
    canvas.words(20, 296, "gathered while a block computes (ZeRO-3)", 13, "start", bold=True)
    for x, words, chosen in ((20, "expert: 1", range(4)), (390, "expert: 2, rank 0", range(2))):
        canvas.words(x, 326, words, 12, "start")
        for number in range(4):
            held = number in chosen
            canvas.box(x + 120 + 58 * number, 310, 54, 24, "parameters" if held else "empty", f"expert {number}", 10)
    return canvas


DRAWINGS: dict[str, Callable[[], Canvas]] = {
    "memory": charts.memory,
    "decision": decision,
    "ddp": ddp,
    "fsdp": fsdp,
    "tensor": tensor,
    "pipeline": charts.pipeline,
    "context": context,
    "expert": expert,
    "recompute": charts.recompute,
    "precision": charts.precision,
    "lora": finetuning.lora,
    "dpo": finetuning.dpo,
}


def pictures() -> dict[Path, str]:
    """File -> its SVG."""
    return {TECHNIQUES / f"{name}.svg": draw().svg() for name, draw in DRAWINGS.items()}
