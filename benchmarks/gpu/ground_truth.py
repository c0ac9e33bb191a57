"""Ground truth: the rates of this GPU, this torch, this cuDNN, for the operations that training is made of.

    python benchmarks/gpu/ground_truth.py --minutes 8
    python benchmarks/gpu/ground_truth.py --device cpu --tiny --out trial.json     # tries the script

Which attention kernel ran (from the profiler), matrix products at the shapes of four models (bf16 and fp8, separate and
fused), attention forward and backward by kernel and length, copies, the head. The most telling cells come first. How each is
timed: timed.py; what it computes: primitives.py and attention.py. A rate above the device's peak, or above the square product
that reaches most, is marked: then the measurement is wrong and not the card fast.

What is not here: products in fp8 are timed without the casts that training needs around them.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from attention import AttentionCase, measure_attention
from book import Book, print_table
from cells import Absent, Cell, run_script, sources_of
from primitives import (
    TINY,
    Shape,
    measure_copy,
    measure_head,
    measure_products,
    measure_square,
    measure_sums,
    shape_of,
)
from timed import Sensors, Timer
from torch.nn.attention import activate_flash_attention_impl

from windlass.hardware import find_device
from windlass.model.attention.flash_versions import VERSIONS, cuda_capability, flash_kept, has_package, why_not_here

MODELS = ("smollm3-3b", "llama-3.1-8b", "qwen3-4b", "qwen2.5-1.5b")
ROWS = (16384, 32768)
TOKENS = 32768
LENGTHS = (8192, 4096, 32768)
SOURCES = sources_of("benchmarks/gpu/primitives.py", "benchmarks/gpu/attention.py", "benchmarks/gpu/timed.py")
SUMS_SOURCES = (*SOURCES, *sources_of("src/windlass/precision/masters.py"))
HEAD_SOURCES = (*SOURCES, *sources_of("src/windlass/model/head/loss.py", "src/windlass/model/head/head.py"))


def make_cells(tiny: bool) -> list[Cell]:
    """All cells, the most telling first."""
    shapes = {name: shape_of(name) for name in MODELS}
    if tiny:
        shapes = {MODELS[0]: TINY}
    rows, lengths = ((64, 128), (128, 64, 256)) if tiny else (ROWS, LENGTHS)
    first = next(iter(shapes.values()))
    wide = TINY if tiny else shapes["llama-3.1-8b"]  # 32 query and 8 key heads of 128; Qwen3-4B has the same
    cells = [_attention("default", wide, lengths[0], tiny)]
    cells += [_square(8192 if not tiny else 128, dtype) for dtype in ("bf16", "fp8")]
    cells += [_copy(1 << 32 if not tiny else 1 << 20)]
    cells += [_sums(wide.inner, wide.hidden, rows[0] // 4)]
    cells += [_products(name, shape, rows[0], "bf16") for name, shape in shapes.items()]
    cells += [_attention(kind, wide, lengths[0], tiny) for kind in ("cudnn", "flash")]
    cells += [_head(name, shape, "chunked", tiny) for name, shape in shapes.items()]
    cells += [_attention("varlen", wide, lengths[0], tiny, documents) for documents in (1, 8, 32)]
    cells += [_products(name, shape, rows[0], "fp8") for name, shape in shapes.items()]
    cells += [_attention(kind, wide, length, tiny) for kind in ("default", "flash") for length in lengths[1:]]
    cells += [_attention("masked", first, lengths[0], tiny), _attention("flex", wide, lengths[0], tiny)]
    cells += [_products(name, shape, rows[1], "bf16") for name, shape in shapes.items()]
    cells += [_head("" if tiny else "smollm3-3b", first, form, tiny) for form in ("dense", "chunked x4")]
    cells += [_attention("default", first, length, tiny, name="smollm3-3b") for length in lengths]
    cells += [_attention("cudnn", wide, length, tiny) for length in lengths[1:]]
    cells += [_attention("varlen", wide, length, tiny, docs) for length in lengths[1:] for docs in (1, 8, 32)]
    cells += [_attention("efficient", wide, length, tiny) for length in lengths]
    cells += [_attention("flex", wide, length, tiny) for length in lengths[1:]]
    cells += [_attention("flex", wide, lengths[0], tiny, 8)]
    cells += [_products(name, shape, rows[1], "fp8") for name, shape in shapes.items()]
    cells += [_versioned(version, wide, lengths[0], tiny, 8) for version in VERSIONS]
    return cells


def _cell(name: str, estimate_s: float, call: Callable[[Timer], dict[str, Any]], **settings: Any) -> Cell:
    def measure(device: torch.device) -> dict[str, Any]:
        with Sensors(device) as sensors:
            found = call(Timer(device, seconds=0.2 if device.type == "cuda" else 0.001))
        return found | {"sensors": sensors.medians()}

    sources = {"head": HEAD_SOURCES, "sums": SUMS_SOURCES}.get(name.partition(" ")[0], SOURCES)
    return Cell(name, estimate_s, measure, sources, settings)


def _products(name: str, shape: Shape, rows: int, dtype: str) -> Cell:
    sizes = {product: list(size) for product, size in shape.products().items()}
    return _cell(
        f"products {dtype} {name} {rows} rows",
        8.0,
        lambda timer: measure_products(shape, rows, dtype, timer),
        rows=rows,
        dtype=dtype,
        products=sizes,
    )


def _square(size: int, dtype: str) -> Cell:
    return _cell(f"square {dtype}", 2.0, lambda timer: measure_square(size, dtype, timer), size=size, dtype=dtype)


def _copy(num_bytes: int) -> Cell:
    return _cell("copy", 2.0, lambda timer: measure_copy(num_bytes, timer), bytes=num_bytes)


def _sums(rows: int, columns: int, inner: int) -> Cell:
    sizes = {"rows": rows, "columns": columns, "inner": inner}
    return _cell("sums of gradients", 8.0, lambda timer: measure_sums(rows, columns, inner, timer), **sizes)


def _attention(kind: str, shape: Shape, length: int, tiny: bool, documents: int = 1, name: str = "") -> Cell:
    # a dense mask in 16 bits for every head is what makes that kernel slow: one sequence is enough of it
    tokens = length if kind == "masked" else max(length, 256 if tiny else TOKENS)
    case = AttentionCase(kind, shape.heads, shape.kv_heads, shape.head_dim, length, tokens, documents)
    several = f" {documents} documents" if documents > 1 else ""
    words = f"attention {kind} {length}{several}{' ' + name if name else ''}"
    estimate_s = 30.0 if kind == "flex" else 3.0
    return _cell(words, estimate_s, lambda timer: measure_attention(case, timer), **vars(case))


def _versioned(version: int, shape: Shape, length: int, tiny: bool, documents: int) -> Cell:
    """varlen by another FlashAttention than torch's own; absent where its package is not installed (later: --again)."""
    plain = _attention("varlen", shape, length, tiny, documents, f"flash {version}")

    def measure(device: torch.device) -> dict[str, Any]:
        if (why := why_not_here(version, cuda_capability(device), has_package(version))) is not None:
            raise Absent(f"FlashAttention {version}: {why}")
        with flash_kept():
            activate_flash_attention_impl(VERSIONS[version])
            return plain.measure(device)

    return replace(plain, estimate_s=30.0, measure=measure)


def _head(name: str, shape: Shape, form: str, tiny: bool) -> Cell:
    tokens = 128 if tiny else 16384
    words = f"head {form} {name}".strip()
    sizes = {"tokens": tokens, "hidden": shape.hidden, "vocab": shape.vocab, "form": form}
    return _cell(words, 3.0, lambda timer: measure_head(shape, tokens, form, timer), **sizes)


def figures(result: dict[str, Any]) -> dict[str, float]:
    """Every rate in a result: where it is found -> TFLOP/s."""
    found: dict[str, float] = {}
    for key, value in result.items():
        if key == "tflops":
            found[""] = value
        elif isinstance(value, dict):
            found |= {f"{key}.{deeper}".rstrip("."): one for deeper, one in figures(value).items()}
    return found


def marks(book: Book) -> list[str]:
    """What cannot be: products above the square one of the same type by more than 3 %, anything above the data sheet."""
    device, found = find_device(book.run["device"]), []
    if book.run["trial"]:
        return []
    rows = {name: row for name, row in book.rows().items() if row["status"] == "measured"}
    for name, row in rows.items():
        dtype = row["settings"].get("dtype", "bf16")
        peak = (device.fp8_flops if dtype == "fp8" else device.peak_flops) if device else None
        square = rows.get(f"square {dtype}")
        limits = {"the peak": peak / 1e12 if peak else None, "the square product": None}
        if square and name.startswith("products"):
            limits["the square product"] = 1.03 * square["result"]["tflops"]
        for place, tflops in figures(row["result"]).items():
            for what, limit in limits.items():
                if limit is not None and tflops > limit:
                    found.append(f"measuring error? {name} {place}: {tflops:.0f} TFLOP/s is above {what} ({limit:.0f})")
    return found


def show(book: Book) -> None:
    rows = book.rows()
    lines: list[list[object]] = []
    for name, row in rows.items():
        if row["status"] != "measured":
            lines.append([name, row["status"], None, None, None, row["message"][:60]])
            continue
        result, watts = row["result"], (row["result"].get("sensors") or {}).get("watts")
        if "products" in result:
            separate, fused = result["separate"], result["fused"]
            lines.append([name, separate["tflops"], fused["tflops"], separate["layer_ms"], watts, "separate, fused"])
        elif "backward" in result:
            kernel = result["kernels"][0]["kernel"] if result["kernels"] else "-"
            forward, backward = result["forward"], result["backward"]
            lines.append(
                [name, forward["tflops"], backward["tflops"], forward["ms"] + backward["ms"], watts, kernel[:60]]
            )
        elif "copy_tb_per_s" in result:
            lines.append(
                [name, result["copy_tb_per_s"], result["cast_tb_per_s"], None, watts, "TB/s: copy, cast to bf16"]
            )
        elif "product_ms" in result:
            rates = (result["torch_added_tb_per_s"], result["compiled_added_tb_per_s"])
            lines.append([name, *rates, result["product_ms"], watts, "TB/s: torch's, compiled"])
        else:
            more = result.get("more_mib")
            lines.append(
                [name, result["tflops"], None, result["ms"], watts, f"+{more} MiB" if more is not None else ""]
            )
    title = f"{book.run['device']}, torch {book.run['torch']}, cuDNN {book.run['cudnn']}: TFLOP/s"
    print_table(title, ("cell", "forward", "backward", "ms", "watts", ""), lines)
    for mark in marks(book):
        print(mark)


def main(arguments: list[str] | None = None) -> int:
    return run_script("ground_truth", __doc__, make_cells, show, arguments)


if __name__ == "__main__":
    sys.exit(main())
