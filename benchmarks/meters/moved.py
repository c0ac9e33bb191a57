"""Bytes that operators move between the device's memory and its units, counted from the operators that run.

An operator reads the tensors it takes and writes those it gives. In place it writes the one it changes, and reads it unless it
overwrites all of it; torch's fused AdamW changes its gradients only where it is given a scale. A view moves nothing. A product
reads its factors once where `reads_of_products` is set, and else not at all: it must read them, and how often it does is the
kernel's affair. A lookup in an embedding reads next to nothing of it.

What a compiled graph moves is counted by Inductor itself, kernel by kernel (`compiled_bytes`).
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = ("embedding", "mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
OVERWRITING = ("copy_", "zero_", "fill_", "uniform_", "normal_", "_foreach_copy_", "split_with_sizes_copy", "chunk_cat")
NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh")


class Moved(TorchDispatchMode):
    """Counts by operator the bytes of tensors of at least `least` elements; `calls`: of operators that moved such a tensor."""

    def __init__(self, least: int = 1, reads_of_products: bool = False, weights: Iterable[torch.Tensor] = ()):
        super().__init__()
        self._least, self._reads_of_products = least, reads_of_products
        self._weights = {_local(one).data_ptr() for one in weights}
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.casts = 0
        """Operators that read one of `weights` and gave a tensor of another dtype."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        out = function(*arguments, **(keywords or {}))
        name = function.overloadpacket.__name__
        if name not in NOTHING and not function.is_view:
            moved = self._of(function, name, arguments, keywords or {}, out)
            self.bytes[name] += moved
            self.calls[name] += moved > 0
        return out

    def _of(self, function: Any, name: str, arguments: Any, keywords: Any, out: Any) -> int:
        changed: list[torch.Tensor] = []
        read: list[torch.Tensor] = []
        given = dict(zip((one.name for one in function._schema.arguments), arguments, strict=False)) | keywords
        for argument in function._schema.arguments:
            tensors = list(self._large(given.get(argument.name)))
            is_changed = argument.alias_info is not None and argument.alias_info.is_write
            if argument.name == "grads" and given.get("grad_scale") is None:
                is_changed = False
            changed += tensors if is_changed else []
            read += [] if is_changed and name in OVERWRITING else tensors
        known = {one.data_ptr() for one in changed}
        made = [one for one in self._large(out) if one.data_ptr() not in known]
        if name in ("_to_copy", "to", "copy_", "_foreach_copy_"):
            given_dtypes = {one.dtype for one in made + changed}
            self.casts += any(one.data_ptr() in self._weights and {one.dtype} != given_dtypes for one in read)
        is_read = name not in PRODUCTS or self._reads_of_products
        return sum(map(size_of, made + changed)) + sum(map(size_of, read)) * is_read

    def _large(self, tree: Any) -> Iterator[torch.Tensor]:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and (local := _local(leaf)).numel() >= self._least:
                yield local

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it: `to_local` would be an operator more."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of its elements; an expanded one counts what it shows."""
    return tensor.numel() * tensor.element_size()


def compiled_bytes(call: Callable[[], Any]) -> int:
    """What the kernels move that `call` compiles, as Inductor counts them: each buffer a kernel takes or gives, once."""
    from torch._functorch import config as graphs
    from torch._inductor import config, metrics
    from torch._inductor.compile_fx import inductor_metrics_log as log  # it counts where this would be printed

    torch._dynamo.reset()
    metrics.reset()
    before = log.level, log.propagate
    log.setLevel("INFO")
    log.propagate = False
    try:
        # a graph from a cache is not counted; what the compiler knows of this CPU, and what g++ built, may come from one
        with config.patch(fx_graph_cache=False), graphs.patch(enable_autograd_cache=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own, on caches and on torch.jit
            call()
    finally:
        log.setLevel(before[0])
        log.propagate = before[1]
    return int(metrics.num_bytes_accessed)
