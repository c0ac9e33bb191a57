"""Drawings of how finetuning works: factors beside a matrix that is cut, and the two passes of a preference loss."""

from drawing import Canvas


def lora() -> Canvas:
    canvas = Canvas(760, 300, "LoRA beside a matrix that is cut over 2 ranks")
    names = {
        "empty": "frozen",
        "parameters": "trained, cut",
        "gradients": "trained, whole",
        "kept": "activations",
        "sent": "sent",
    }
    canvas.legend(20, 28, names)
    halves = (
        (58, "q k v gate up: cut by output features", "x|T x D", "half W's rows", "half|T x F/2", ("whole", "half")),
        (
            390,
            "o down: cut by input features",
            "half|T x F/2",
            "half W's columns",
            "a part|of the|sum",
            ("half", "whole"),
        ),
    )
    for left, title, read, matrix, made, factors in halves:
        canvas.words(left, 60, title, 13, "start", bold=True)
        for y in (76, 176):
            canvas.box(left, y, 58, 82, "kept", read, 11)
            canvas.box(left + 82, y, 140, 40, "empty", matrix, 11)
            for x, name, share in zip((left + 82, left + 162), "AB", factors, strict=True):
                canvas.box(x, y + 48, 60, 34, "gradients" if share == "whole" else "parameters", f"{name}: {share}", 11)
            canvas.arrow(left + 60, y + 20, left + 80, y + 20)
            canvas.arrow(left + 60, y + 65, left + 80, y + 65)
            canvas.arrow(left + 144, y + 65, left + 160, y + 65)
            canvas.arrow(left + 224, y + 20, left + 244, y + 20)
            canvas.arrow(left + 224, y + 65, left + 244, y + 65)
            canvas.box(left + 246, y, 58, 82, "kept" if left == 58 else "card", made, 11)
    canvas.box(20, 76, 26, 182, "sent", "G|A|T|H|E|R", 11)
    canvas.box(714, 76, 26, 182, "sent", "S|C|A|T|T|E|R", 11)
    for y in (117, 217):
        canvas.arrow(47, y, 57, y)
        canvas.arrow(696, y, 712, y)
    canvas.words(
        20, 284, "s B (A x) is a part of the same kind as W x, and is added to it before anything is sent.", 12, "start"
    )
    return canvas


def dpo() -> Canvas:
    canvas = Canvas(760, 306, "DPO: a batch of pairs is scored, then trained on")
    canvas.legend(330, 28, {"data": "rows", "parameters": "model", "empty": "frozen", "kept": "numbers per row"})
    canvas.words(20, 28, "1. score: forward, no gradient", 13, "start", bold=True)
    for y, model, colour, score in (
        (44, "model p: with factors", "parameters", "log p"),
        (96, "reference q: without factors", "empty", "log q"),
    ):
        canvas.arrow(104, y + 20, 130, y + 20)
        canvas.box(132, y, 190, 40, colour, model, 11)
        canvas.arrow(324, y + 20, 350, y + 20)
        canvas.box(352, y, 74, 40, "kept", f"{score} of|each row", 11)
        canvas.arrow(428, y + 20, 452, y + 20)
    canvas.box(20, 44, 82, 92, "data", "prompt and|chosen||prompt and|rejected", 11)
    canvas.box(454, 44, 130, 92, "card", "loss of the pair,|differentiated by|its two log p", 11)
    canvas.arrow(586, 90, 618, 90)
    canvas.box(620, 44, 120, 92, "kept", "weight w and|offset o|of each row", 11)
    canvas.words(227, 154, "or scores kept since before step 0", 11, colour="faint")
    canvas.line([(680, 138), (680, 168), (480, 168), (480, 202)], arrow=True)
    canvas.words(20, 190, "2. train: forward and backward", 13, "start", bold=True)
    canvas.box(20, 206, 82, 60, "data", "the same|rows", 11)
    canvas.arrow(104, 236, 130, 236)
    canvas.box(132, 206, 190, 60, "parameters", "model p", 11)
    canvas.arrow(324, 236, 350, 236)
    canvas.box(352, 206, 74, 60, "kept", "nats of|each row", 11)
    canvas.arrow(428, 236, 452, 236)
    canvas.box(454, 206, 130, 60, "card", "sum of w nats + o", 11)
    canvas.arrow(586, 236, 618, 236)
    canvas.box(620, 206, 120, 60, "gradients", "backward:|gradients|of the factors", 11)
    canvas.words(20, 290, "The sum has the value and the gradient that the loss has at these weights.", 12, "start")
    return canvas
