"""Counts calls, ATen operations and scalar reads over a window of training steps, without touching the code that trains.

A step lasts from one entry of a given function (the decoder's forward) in training to the next; nothing is wrapped or patched.
The first WARM_UP steps are not counted. Then come two windows of STEPS steps:

1. `sys.setprofile` of the training thread counts every call of a Python function and of a C function (its events `call` and
   `c_call`; making an object of a C type, float(x) say, is neither). On CPU autograd runs in the thread that called backward, so
   backward is counted. Threads that are started meanwhile are counted apart, through `threading.setprofile`.
2. A TorchDispatchMode counts every ATen operation of forward, backward and update, and which of them wait for the device: READS.
   A window of its own, because the mode makes Python calls. Tensor.tolist and Tensor.numpy read without an operation: their calls
   in the first window are added to the reads.

The counts are exact, and the same on a slow machine, but for the few calls of waiting for another thread that is late.
"""

import os
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WARM_UP, STEPS = 10, int(os.environ.get("COUNTED_STEPS", "20"))  # the tests count fewer: means are the same
READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select")
READING_METHODS = ("tolist", "numpy")


class Count(TorchDispatchMode):
    """Counts between two entries of `code` in training; `functions` says whose calls they are. See the top of the file."""

    def __init__(self, code: CodeType):
        super().__init__()
        self._code, self._entries, self._counts_calls = code, 0, False
        self.functions: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.num_calls = self.num_thread_calls = self.num_method_reads = 0

    def start(self) -> None:
        threading.setprofile(self._in_another_thread)
        sys.setprofile(self._in_training_thread)

    def _in_training_thread(self, frame: FrameType, event: str, callee: Any) -> None:
        if event == "call" and frame.f_code is self._code and frame.f_locals["self"].training:
            self._entries += 1
            self._turn()
        if not self._counts_calls or event not in ("call", "c_call"):
            return
        self.num_calls += 1
        if event == "call":
            self.functions[f"{_file(frame.f_code)}:{frame.f_code.co_qualname}"] += 1
            return
        self.functions[f"C {callee.__qualname__} in {_file(frame.f_code)}:{frame.f_code.co_qualname}"] += 1
        if callee.__name__ in READING_METHODS and isinstance(callee.__self__, torch.Tensor):
            self.num_method_reads += 1

    def _in_another_thread(self, _frame: FrameType, event: str, _callee: Any) -> None:
        self.num_thread_calls += self._counts_calls and event in ("call", "c_call")

    def _turn(self) -> None:
        """At the entry of a step: calls, then operations, then nothing is counted."""
        if self._entries == WARM_UP + 1:
            self._counts_calls = True
        elif self._entries == WARM_UP + STEPS + 1:
            self._counts_calls = False
            self.__enter__()
        elif self._entries == WARM_UP + 2 * STEPS + 1:
            self.__exit__(None, None, None)
            sys.setprofile(None)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.operations[function.overloadpacket.__name__] += 1
        return function(*arguments, **(keywords or {}))

    def per_step(self) -> dict[str, Any]:
        """Means over the window. Every one of STEPS steps was seen, or this raises."""
        assert self._entries > WARM_UP + 2 * STEPS, f"{self._entries} steps of training were seen"
        reads = sum(self.operations[name] for name in READS) + self.num_method_reads
        return {
            "calls": self.num_calls / STEPS,
            "operations": sum(self.operations.values()) / STEPS,
            "reads": reads / STEPS,
            "calls_in_other_threads": self.num_thread_calls / STEPS,
            "by_function": {name: number / STEPS for name, number in self.functions.most_common()},
            "by_operation": {name: number / STEPS for name, number in self.operations.most_common()},
        }


def _file(code: CodeType) -> str:
    """The last two parts of a path: enough to know a file by."""
    return "/".join(Path(code.co_filename).parts[-2:])
