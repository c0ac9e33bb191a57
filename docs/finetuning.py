"""Drawings of how finetuning works: factors beside a matrix that is cut."""

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
