"""Kernels that give the same bits twice, where a recipe asks for them.

On a CPU all of ours do. On a GPU the backward of the fastest attention kernels adds the parts of a query's gradient in the order
in which blocks finish: of the 338 gradients of Qwen2.5-1.5B's first step 0 to 278 had other bits in a second step from the same
weights (one H200, torch 2.11, cuDNN 9.19), and two equal runs of GPT-2 124M were apart in the fifth digit of the loss from step 3
on. A checkpoint restores exact bits on a GPU too. After it, a resumed run differs from the uninterrupted one as much as two equal
runs differ. Under this setting the losses of two runs of GPT-2 124M, and of one that was killed after step 14 and went on, were
the same in all 20 steps (one H200, torch 2.11), and so were all gradients of two first steps of Qwen3
(benchmarks/gpu/gradients.py). Its price was not measured.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def same_bits(is_asked: bool) -> Iterator[None]:
    """Meanwhile torch takes kernels that give the same bits twice, and raises where an operator has none. Enter it before CUDA is
    used: cuBLAS reads its setting, which stays in the environment, once."""
    if not is_asked:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS's own page asks for
    memory: Any = torch.utils.deterministic
    fills, was = memory.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    memory.fill_uninitialized_memory = False  # it finds bugs, at a write per tensor
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)
        memory.fill_uninitialized_memory = fills
