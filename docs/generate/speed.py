"""Tables of docs/flops.md, performance.md and scale.md: FLOPs of the presets, two published reports counted again, what real runs
of benchmarks/layouts.py keep and send, and rows of other benchmarks. Every number is computed here; fill.py puts the tables into
their places."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windlass.advice.mfu import levels
from windlass.hardware import find_device
from windlass.model.architecture import Architecture
from windlass.model.flops import count_multiplied, count_parameters, flops_per_token, recomputed_flops
from windlass.units import GIB, MIB

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results"
RESULTS = MEASURED / "layouts.json"
PRESETS = ("gpt2-124m", "qwen2.5-1.5b", "smollm3-3b", "qwen3-4b", "llama-3.1-8b", "llama-2-13b", "qwen3-30b-a3b")
H100, T4, UNKNOWN = "NVIDIA H100 80GB HBM3", "Tesla T4", 100e12


def architecture(preset: str) -> Architecture:
    from windlass.model.config import ModelConfig

    return ModelConfig(preset=preset).architecture()


def peak(device: str) -> float:
    found = find_device(device)
    assert found is not None
    return found.peak_flops


def presets() -> str:
    rows = []
    for preset in PRESETS:
        arch = architecture(preset)
        length = min(8192, 1024 if preset.startswith("gpt2") else 4096 if "llama-2" in preset else 8192)
        flops = flops_per_token(arch, length)
        again = recomputed_flops(arch, length) / flops.causal
        counted = (f"{value / 1e9:.2f}" for value in (flops.six_n, flops.palm, flops.causal))
        cells = (
            preset,
            f"{count_parameters(arch):,}",
            f"{count_multiplied(arch):,}",
            f"{length:,}",
            *counted,
            f"{again:.0%}",
        )
        rows.append(cells)
    head = ("preset", "parameters", "multiplied", "T", "6 N", "PaLM", "causal", "`recompute: full` adds")
    return table(head, rows)


def smollm3() -> str:
    """SmolLM3-3B at 8,192 tokens, term by term."""
    arch, length = architecture("smollm3-3b"), 8192
    h, f, layers = arch.hidden_size, arch.intermediate_size, arch.num_layers
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    block, head = h * (2 * q + 2 * kv) + 3 * h * f, arch.vocab_size * h
    product = f"{h:,} x {2 * q + 2 * kv:,} + 3 x {h:,} x {f:,} = {block:,} weights"
    scores = 12 * layers * q * length
    rows = [
        ("a block: h (2q + 2kv) + 3 h f", product, f"{6 * block / 1e9:.3f}"),
        (f"{layers} blocks", f"{layers * block:,}", f"{6 * layers * block / 1e9:.2f}"),
        ("the head, tied to the embedding: V h", f"{arch.vocab_size:,} x {h:,} = {head:,}", f"{6 * head / 1e9:.2f}"),
        ("all matrices", f"{layers * block + head:,}", f"{6 * (layers * block + head) / 1e9:.2f}"),
        ("attention, full: 12 L q T", f"12 x {layers} x {q:,} x {length:,}", f"{scores / 1e9:.2f}"),
        ("attention, causal: half of it", "", f"{scores / 2e9:.2f}"),
        ("PaLM: matrices and full attention", "", f"{(6 * (layers * block + head) + scores) / 1e9:.2f}"),
        ("**causal: matrices and half of attention**", "", f"**{(6 * (layers * block + head) + scores / 2) / 1e9:.2f}**"),
    ]  # fmt: skip
    return table(("term", "count", "GFLOP per token"), rows)


def guide() -> str:
    """An FSDP2 guide on SmolLM3-3B, 4 H100, 8,192 tokens: its formula and its result, counted again."""
    arch, length, tokens_per_s, tflops = architecture("smollm3-3b"), 8192, 8414.69, 202.97
    h, q, f, layers = arch.hidden_size, arch.num_heads * arch.head_dim, arch.intermediate_size, arch.num_layers
    exact, head = flops_per_token(arch, length), 6 * arch.vocab_size * h
    printed = 6 * (h * 3 * q + 2 * q * length + q * h + 3 * h * f) * layers
    block = h * 2 * (q + arch.num_kv_heads * arch.head_dim) + 3 * h * f
    heads = 12 * h * (q - arch.num_kv_heads * arch.head_dim) * layers
    other = "full attention, no head, 4 K/V heads: other code ran"
    rows = [
        ("its formula, with the model's true sizes", printed, "three times all heads for Q, K, V; full attention; no head"),
        ("its text", 24.2e9, "40 layers and 8,192 channels, where the model has 36 and 11,008"),
        (f"its result: {tflops} TFLOP/s at {tokens_per_s:,} tok/s", tflops * 1e12 / tokens_per_s, other),
        ("PaLM without the head", exact.palm - head, "equals that result"),
        ("exact, causal", exact.causal, ""),
    ]  # fmt: skip
    body = [(name, f"{value / 1e9:.2f}", f"{value / exact.causal - 1:+.1%}", why) for name, value, why in rows]
    parts = (
        ("K and V counted with all heads", heads),
        ("full attention", exact.palm - exact.causal),
        ("head left out", -head),
    )
    terms = ", ".join(f"{name} {value / 1e9:+.2f}" for name, value in parts)
    honest = tokens_per_s * exact.causal / peak(H100)
    return table(("count", "GFLOP per token", "beside exact", "because"), body) + (
        f"\nThe terms of its formula: {terms} GFLOP. {tokens_per_s:,} tok/s is the rate of one GPU, since its counter gets one "
        f"rank's tokens: the four do {4 * tokens_per_s:,.0f}, and its cost per token is four times too high. "
        f"Its MFU of 20.5 % is {honest:.1%} by the causal count. Its 40 all-gathers of 240 GB are {layers} of "
        f"{2 * block / 1e6:.0f} MB, {2 * layers * block / 1e9:.1f} GB per pass in bf16.\n"
    )


def t4() -> str:
    """A benchmark of Qwen2.5-1.5B on 2 T4, 1,024 tokens: its MFU of 100 TFLOP/s a card, counted again."""
    flops = flops_per_token(architecture("qwen2.5-1.5b"), 1024)
    rows = []
    for name, tokens_per_s, printed in (
        ("nothing recomputed", 406.041, 1.8804),
        ("full recomputation", 303.732, 1.4066),
    ):
        mfu = (
            tokens_per_s * flops.six_n / (2 * UNKNOWN),
            tokens_per_s * flops.six_n / (2 * peak(T4)),
            tokens_per_s * flops.causal / (2 * peak(T4)),
        )
        rows.append((name, f"{tokens_per_s}", f"{printed} %", *(f"{100 * value:.2f} %" for value in mfu)))
    head = ("run", "tok/s", "printed MFU", "6 N of 100 TFLOP/s", "6 N of a T4's 65", "causal of a T4's 65")
    return table(head, rows)


def what_mfu_means() -> str:
    found = levels(flops_per_token(architecture("smollm3-3b"), 8192).causal, peak(H100))
    rows = [(f"{one.mfu:.0%}", f"{one.tokens_per_s:,.0f}", f"{one.hours:.1f}", one.meaning) for one in found]
    return table(("MFU", "tok/s of one H100, SmolLM3-3B at 8,192", "hours for 10^9 tokens", "means"), rows)


def layouts() -> str:
    rows = []
    for name, row in json.loads(RESULTS.read_text("utf-8"))["rows"].items():
        standing = row["parameters"] + row["gradients"] + row["states"] + row["gathered"]
        sent = row["sent"].values()
        calls = sum(kind["calls"] for kind in sent)
        rows.append((name, mib(standing), mib(row["kept"]), mib(sum(kind["ring"] for kind in sent)), f"{calls}",
                     f"{row['flops'] / 1e9:.2f}", f"{row['cpu_s']:.2f}"))  # fmt: skip
    head = ("layout, recompute", "weights, gradients, states, gathered: MiB", "kept for backward: MiB", "sent: MiB", "calls",
            "GFLOP of products", "CPU seconds")  # fmt: skip
    return table(head, rows)


def gpu_cells(name: str) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads((MEASURED / f"gpu-{name}.json").read_text("utf-8"))["cells"]
    return [cell for cell in cells if cell["status"] == "measured"]


def gpu_rows() -> str:
    """Headline rows: what one GPU trained per second."""
    rows = []
    for cell in sorted(gpu_cells("headline"), key=lambda cell: ("," in cell["name"], cell["name"])):
        one = cell["result"]
        setup = one["setup"]
        given = (
            f"{setup['micro_batch']} x {setup['sequence_length']:,}, {setup['recompute']}, states in {setup['states']}"
        )
        device = f"{cell['device'].removeprefix('NVIDIA ')}, torch {cell['torch'].partition('+')[0]}"
        mfus = ("-" if one[key] is None else f"{one[key]:.1%}" for key in ("mfu_causal", "mfu_palm"))
        figures = (f"{one['tokens_per_s']:,.0f}", *mfus)
        rows.append((cell["name"], device, given, *figures, f"{one['allocated_gib']:.1f}"))
    head = ("model", "device", "micro-batch, recompute", "tok/s", "MFU, causal", "PaLM", "GiB")
    return table(head, rows)


def gpu_kernels() -> str:
    """Where the time of those steps went, in microseconds per token."""
    cells = gpu_cells("kernels")
    kinds = sorted({kind for cell in cells for kind in cell["result"]["kinds"]})
    rows = []
    for cell in cells:
        one = cell["result"]
        shares = [1e3 * one["kinds"].get(kind, {"ms": 0.0})["ms"] / one["tokens"] for kind in kinds]
        waiting = 1e3 * (one["wall_ms"] - one["kernels_ms"]) / one["tokens"]
        rows.append((cell["name"], *(f"{share:.2f}" for share in (*shares, waiting))))
    return table(("us per token", *kinds, "no kernel runs"), rows)


def gpu_train() -> str:
    """`windlass train` itself, without a layout in its recipe."""
    rows = []
    for cell in gpu_cells("train"):
        one = cell["result"]
        memory, save = one["memory_bytes"] / GIB, f"{one['save_bytes'] / 1e9:.1f} GB, {one['save_stall_s']:.1f} s"
        batch = one["derived"]["global batch"]
        rows.append((cell["name"], batch, f"{one['tokens_per_s']:,.0f}", f"{one['mfu']:.1%}", f"{memory:.1f}", save))
    return table(("model", "`auto` chose", "tok/s", "MFU, causal", "GiB", "a save: size, wait"), rows)


def gpu_peer() -> str:
    """transformers' Trainer on the job of the row smollm3-3b."""
    rows = []
    for cell in gpu_cells("peer"):
        one, given = cell["result"], cell["result"]["try"]
        words = f"{given['micro_batch']} x {given['length']:,}{', gradient checkpointing' if given['checkpointing'] else ''}"
        rows.append(
            (
                cell["name"],
                words,
                f"{one['tokens_per_s']:,.0f}",
                f"{one['mfu_causal']:.1%}",
                f"{one['allocated_gib']:.1f}",
            )
        )
    return table(("loop", "micro-batch", "tok/s", "MFU, causal", "GiB"), rows)


def gpu_learning() -> str:
    """The same run in every precision, beside fp32."""
    cells = {cell["name"]: cell["result"] for cell in gpu_cells("learning")}
    truth, rows = cells["fp32"], []
    for name, one in sorted(cells.items(), key=lambda cell: cell[1]["validation"]):
        figures = (f"{one[key]:.4f} ({one[key] - truth[key]:+.4f})" for key in ("training", "validation"))
        rows.append((name, *figures))
    return table(("precision", "training, last 100 steps", "validation"), rows)


def gpu_faults() -> str:
    """What became of a run that was signalled."""
    keys = ("left_with", "last_step_before", "went_on_from", "equal_losses")
    cells = [cell for cell in gpu_cells("faults") if "equal_losses" in cell["result"]]
    rows = [(cell["name"], *(str(cell["result"][key]) for key in keys)) for cell in cells]
    return table(("signal", "exit code", "last step before", "went on from", "losses with the same bits, of 40"), rows)


def cores() -> str:
    """Tokens per second of trainers on CPU cores."""
    measured = json.loads((MEASURED / "throughput.json").read_text())["rows"]
    named = {"windlass spinning": "threads spin", "trainer": "Trainer", "accelerate": "Accelerate", "litgpt": "LitGPT"}
    others = {other: name for other, name in named.items() if any(other in row for row in measured.values())}
    rows = []
    for name, row in measured.items():
        each = (row.get(one) for one in ("windlass", *others))
        rates = ("" if one is None else f"{one['tokens_per_s']:,} ({one['spread']:.2f})" for one in each)
        best = max(row[other]["tokens_per_s"] for other in others if other in row and other != "windlass spinning")
        machine = f"{row['machine']['cpu']}, {row['date']}"
        rows.append((name, *rates, f"{row['windlass']['tokens_per_s'] / best:.2f}", machine))
    return table(("row", "windlass", *others.values(), "over the fastest", "CPU, instructions, date"), rows)


def page() -> str:
    """What the report of a million logged lines costs."""
    one = json.loads((MEASURED / "page.json").read_text("utf-8"))
    machine = f"{one['machine']['cores']} cores, load {one['machine']['load_before']:.2f}, {one['date']}"
    rows = [
        ("reading all and writing the page", f"{one['cpu_s']:.1f} CPU seconds"),
        ("memory while it does", f"{one['memory_mb']} MB"),
        ("the page", f"{one['page_bytes'] / 1e6:.2f} MB"),
        ("reading ten lines that are new", f"{one['new_lines_ms']:.1f} ms, {one['new_bytes'] / 1e3:.1f} kB sent"),
    ]
    return table((f"{one['lines']:,} logged steps ({one['file_mb']} MB; {machine})", ""), rows)


def shuffle() -> str:
    """How well an order mixes a corpus that is sorted by source, from the order alone."""
    found: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for row in json.loads((MEASURED / "shuffle.json").read_text("utf-8"))["order"]["rows"]:
        found.setdefault((row["order"], row["lanes"], row["window"]), {})[row["batch"]] = row
    rows = []
    for (order, lanes, window), batches in found.items():
        name = {"lanes": f"{lanes} lanes, window {window}", "plain": f"plain, window {window}"}.get(order, order)
        shares = (f"{row['distance_mean']:.3f} / {row['distance_p99']:.3f}" for row in batches.values())
        one = batches[512]
        rows.append((name, f"{one['shards_per_host']:,}", *shares, f"{one['apart']:.3f}", f"{one['together']:.2%}"))
    head = ("order", "shards per host", "batch of 64", "of 512", "of 4,096", "apart", "together")
    return table(head, rows)


def shuffle_trained() -> str:
    """The validation losses of runs that read such a corpus once, and their distance from the mean of `global`."""
    losses: dict[str, list[float]] = {}
    for row in json.loads((MEASURED / "shuffle.json").read_text("utf-8"))["train"]["rows"]:
        losses.setdefault(row["order"], []).append(row["validation"])
    means = {order: sum(found) / len(found) for order, found in losses.items()}
    rows = [
        (order, *(f"{loss:.3f}" for loss in found), f"{means[order]:.3f} ({means[order] - means['global']:+.3f})")
        for order, found in losses.items()
    ]
    return table(("order", *(f"seed {seed}" for seed in range(len(losses["global"]))), "mean"), rows)


def mib(size: float) -> str:
    return f"{size / MIB:.2f}"


def table(head: tuple[str, ...], rows: list[Any]) -> str:
    lines = (head, ("---", *("---:" for _ in head[1:])), *rows)
    return "\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "presets": presets,
    "smollm3": smollm3,
    "guide": guide,
    "t4": t4,
    "mfu": what_mfu_means,
    "layouts": layouts,
    "page": page,
    "cores": cores,
    "shuffle": shuffle,
    "shuffle trained": shuffle_trained,
    "gpu": gpu_rows,
    "gpu faults": gpu_faults,
    "gpu kernels": gpu_kernels,
    "gpu learning": gpu_learning,
    "gpu peer": gpu_peer,
    "gpu train": gpu_train,
}


def speed(argument: str, _page: Path) -> str:
    return TABLES[argument]()
