"""How many bytes of tensors live at once, counted from the operators of the calling thread: no allocator, no time."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`peak`: of the storages that operators inside have read or made. Those of a mapped file, which the page cache holds, are
    left out, and what an operator frees before it returns."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._live = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves([args, kwargs, result]):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                weak = StorageWeakRef(storage)
                self._live.setdefault(weak.cdata, (weak, 0 if storage.filename else storage.nbytes()))
        self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result
