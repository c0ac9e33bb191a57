"""Which FlashAttention the rows of several documents run: torch's own, version 2, or version 3 (arXiv 2407.08608) or 4 where a
package of it is installed.

torch has a registry of them (torch.nn.attention, since 2.11). Activating one replaces torch's flash operators of CUDA in the
dispatcher, for the whole process: below varlen_attn, and below the flash kernel of scaled_dot_product_attention. Callers,
autograd, the list of recomputation and compiled graphs see the same operators as before.

    version  package                                      compute capability
    3        flash_attn_interface, built in hopper/       9.x
    4        flash_attn.cute, of flash-attn-4             9.x, 10.x

A replaced operator raises where it lacks something, in the middle of a step, and what a package lacks changes with its version.
So a version is first ruled out by what is known, and then tried before step 0: forward and backward in the run's own dtype,
heads and windows, against the softmax written out in fp32 (unfused.py). What raises, or is far from it, is not used.

Legend: B rows, M documents of a row, T positions, H query heads, G key/value heads, K channels per head.
"""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from windlass.model.architecture import Architecture
from windlass.model.attention.documents import attend_varlen, find_documents, fits_flash
from windlass.model.attention.layout import AttentionLayout
from windlass.model.attention.unfused import attend_unfused

VERSIONS: Final = {3: "FA3", 4: "FA4"}
"""Versions that torch does not bring -> their names in its registry. The first that runs is taken: 3 was written for Hopper."""
PACKAGES: Final = {3: "flash_attn_interface", 4: "flash_attn.cute"}
MAJORS: Final = {3: (9,), 4: (9, 10)}  # torch 2.13, torch/nn/attention/_fa3.py and _fa4.py
SAME_BITS_CHANNELS: Final = 192
"""The most per head in version 3's deterministic backward (hopper/flash_api.cpp)."""
TRIED_TOKENS: Final = 512  # several blocks of 64 to 128 queries, as such kernels take them
TRIED_WINDOW: Final = 100  # no multiple of a block
FAR: Final = 3e-2
"""Relative to the exact result, in norm: bf16's tolerance of this project. A wrong mask is off by 1e-1 and more."""


def cuda_capability(device: torch.device) -> tuple[int, int] | None:
    """NVIDIA's compute capability; None of a CPU, and of AMD's GPUs, which have numbers of their own."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


def has_package(version: int) -> bool:
    """Whether a version's package is installed. Imports nothing: a package built for another torch fails when it is imported."""
    root, _, folder = PACKAGES[version].partition(".")
    spec = importlib.util.find_spec(root)
    if spec is None or not folder:
        return spec is not None
    return any((Path(path) / folder / "interface.py").is_file() for path in spec.submodule_search_locations or ())


def why_not_here(version: int, capability: tuple[int, int] | None, is_installed: bool) -> str | None:
    """Why no model runs a version on a device; None where one may."""
    if capability is None:
        return "it runs on NVIDIA's GPUs alone"
    if capability[0] not in MAJORS[version]:
        needed = " or ".join(f"{major}.x" for major in MAJORS[version])
        return f"it needs compute capability {needed}, and this device has {capability[0]}.{capability[1]}"
    return None if is_installed else f"its package {PACKAGES[version]} is not installed"


def why_no_flash(arch: Architecture, dtype: torch.dtype) -> str | None:
    """Why a model runs FlashAttention of no version; None where it does. These are attend's own rules."""
    if arch.attn_dropout:
        return "attention weights are dropped, which runs unfused"
    if arch.score_cap is not None:
        return "scores are capped, which runs unfused"
    if not fits_flash(dtype, arch.head_dim):
        name = str(dtype).removeprefix("torch.")
        return f"it takes 16 bits and heads of 8 to 256 channels by eights, not {name} and {arch.head_dim} channels"
    return None


def why_not_for(version: int, arch: Architecture, dtype: torch.dtype, is_deterministic: bool) -> str | None:
    """Why a version does not run a model, by what is known without running it; None where it may."""
    if (why := why_no_flash(arch, dtype)) is not None:
        return why
    if version == 3 and is_deterministic and arch.head_dim > SAME_BITS_CHANNELS:
        return f"its deterministic backward takes at most {SAME_BITS_CHANNELS} channels per head, not {arch.head_dim}"
    return None


@contextlib.contextmanager
def flash_kept() -> Iterator[None]:
    """Afterwards what is active now is active again."""
    before = current_flash_attention_impl()
    try:
        yield
    finally:
        _activate(before)


def use_torchs_flash() -> None:
    """From here on torch's own version 2."""
    _activate(None)


def try_flash_version(
    version: int, arch: Architecture, dtype: torch.dtype, device: torch.device, *, slices: bool, is_deterministic: bool
) -> str | None:
    """Activates a version and runs it once. None: it is right, and stays active. Else why not, and what was active before is
    again. `slices`: queries are the second half of their row, as under context parallelism."""
    before = current_flash_attention_impl()
    try:
        _activate(VERSIONS[version])
        lengths = (0, TRIED_TOKENS // 2) if slices else (0,)
        windows = {arch.window if layer in arch.window_layers else None for layer in range(arch.num_layers)}
        trials = ((offset, window) for offset in lengths for window in windows)
        found = (_wrong(arch, dtype, device, offset, window, is_deterministic) for offset, window in trials)
        why = next((one for one in found if one is not None), None)
    except Exception as error:  # whatever the package, or its compiler, raises
        first = (str(error).strip() or "no words").splitlines()[0]
        why = f"tried before step 0 it raised {type(error).__name__}: {first}"
    if why is not None:
        _activate(before)
    return why


def _activate(name: str | None) -> None:
    if name == current_flash_attention_impl():
        return
    if name is None:
        restore_flash_attention_impl()
    else:
        activate_flash_attention_impl(name)


def _wrong(
    arch: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    offset: int,
    window: int | None,
    is_deterministic: bool,
) -> str | None:
    """What is wrong with the active kernel: too far from the exact result, or other bits the second time."""
    window = None if window is None else min(window, TRIED_WINDOW)
    made = torch.Generator().manual_seed(0)  # the run's own random numbers stay where they are
    rows, queries = 2, TRIED_TOKENS - offset
    shapes = [(arch.num_heads, queries), *[(arch.num_kv_heads, TRIED_TOKENS)] * 2, (arch.num_heads, queries)]
    given = [torch.randn(rows, *shape, arch.head_dim, generator=made).to(device, dtype) for shape in shapes]
    # a short and a long document, one of a token, one that begins in the second half, and entries that are filled up
    starts_BM = torch.tensor([[0, 7, 200, 201, 300], [0, *[TRIED_TOKENS] * 4]], device=device)
    documents = find_documents(starts_BM, TRIED_TOKENS, offset)
    layout = AttentionLayout(offset, window, documents)
    nothing_B = torch.zeros(rows, dtype=torch.int64, device=device)

    def differentiated(is_exact: bool) -> list[Tensor]:
        """The output, and the gradients of queries, keys and values."""
        *heads, grad_BHTK = (x.float() if is_exact else x for x in given)
        q_BHTK, k_BGTK, v_BGTK = (x.detach().requires_grad_() for x in heads)
        if is_exact:
            out_BHTK = attend_unfused(q_BHTK, k_BGTK, v_BGTK, layout, 0.0, nothing_B)
        else:
            out_BHTK = attend_varlen(q_BHTK, k_BGTK, v_BGTK, documents, window)
        return [out_BHTK.detach(), *torch.autograd.grad(out_BHTK, (q_BHTK, k_BGTK, v_BGTK), grad_BHTK)]

    found, exact = differentiated(False), differentiated(True)
    names = ("the output", "the gradient of queries", "the gradient of keys", "the gradient of values")
    for name, one, other in zip(names, found, exact, strict=True):
        far = ((one.float() - other).norm() / other.norm()).item()
        if not far <= FAR:  # nan is far, too
            return f"tried before step 0, {name} was off by {far:.1%} of its norm"
    if is_deterministic and not all(map(torch.equal, found, differentiated(False))):
        return "tried before step 0, a second call gave other bits, and run.deterministic is set"
    return None
