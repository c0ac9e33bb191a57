"""Compiled kernels that race: they read back what other threads of theirs have just written, with nothing to wait for.

torch's compiler splits a reduction over long rows into two loops. Where the second needs an intermediate of the first, it may
store it and load it again. Triton then gives store and load different threads for the same numbers (its issue 10924), and without
a barrier the load finds what was in memory before. torch 2.11 and 2.13 put none there; pull request 190519 of PyTorch adds it.

Met on an H200 with torch 2.11, in the backward of layers of experts 256 wide: the right loss, and wrong gradients below them,
other ones each time. There the check names that kernel, and none of Qwen3's and Gemma 2's, whose gradients are near fp32's
(benchmarks/results/gpu-gradients.json; compiled, Gemma 2's at width 2,048 had other bits in a second step, which is open).
Experts are not compiled since (model/transformer.py). Compiled for an H200 on a machine without one, for other sizes, the blocks
of Gemma 2 and 3 at width 2,048 have such a kernel. Those of SmolLM3-3B, Llama-3.1-8B, Qwen3-4B, Qwen2.5-1.5B, GPT-2 and of nine
more families have none, nor have the first halves of Qwen3-30B-A3B's and Mixtral's. So the kernels themselves are looked at,
after the first step.
"""

import re
from pathlib import Path
from typing import Final

from windlass.errors import UserError
from windlass.runtime import Runtime

KERNEL: Final = re.compile(r"^@triton\.jit\ndef (triton_\w+)\(.*?(?=^'''|\Z)", re.M | re.S)
STORE: Final = re.compile(r"tl\.store\((\w+)")
BARRIER: Final = "tl.debug_barrier()"


def races(kernel: str) -> bool:
    """Whether a kernel of Triton's loads from a pointer after it has stored there, with no barrier between."""
    for stored in STORE.finditer(kernel):
        rest = kernel[stored.end() :]
        loaded = re.search(rf"tl\.load\({stored[1]}\b", rest)
        if loaded is not None and BARRIER not in rest[: loaded.start()]:
            return True
    return False


def racing_in(source: str) -> list[str]:
    """The kernels of a module that torch's compiler wrote that race, by name."""
    return [found[1] for found in KERNEL.finditer(source) if races(found[0])]


def compiled_files() -> set[Path]:
    """The modules that torch's compiler has written in this process so far."""
    from torch._inductor.codecache import PyCodeCache  # costs a second, and is loaded where something is compiled

    files = {Path(module.__file__) for module in PyCodeCache.modules if module.__file__ is not None}
    return {file for file in files if file.exists()}


def racing_kernels(runtime: Runtime) -> list[str]:
    """Names of the racing kernels among all that the ranks have compiled so far. Collective."""
    own = [name for file in compiled_files() for name in racing_in(file.read_text("utf-8"))]
    return sorted({name for names in runtime.gathered(own) for name in names})


def refuse_races(runtime: Runtime) -> None:
    """Raises UserError, on all ranks alike, where a compiled kernel races. Collective."""
    found = racing_kernels(runtime)
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise UserError(
            f"parallel.compile=true: the compiled kernel {found[0]}{more} reads back what its other threads have just written",
            "this torch puts no barrier there, so it may read anything, and gradients are silently wrong; "
            "this step was not saved",
            "use parallel.compile=false, or a torch whose compiler has the barrier (pull request 190519 of PyTorch)",
        )
