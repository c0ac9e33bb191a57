"""What one rank keeps and sends in a training step of a real run, counted while the run goes on as ever.

    parameters, gradients, states    bytes of this rank's own parts, when the optimizer has stepped, is about to, and has
    gathered, whole_gradients        bytes of whole parameters that FSDP has put together, and of gradients not yet cut, the most
                                     at once when a unit or a block begins or ends its forward
    kept                             bytes that the decoder's blocks keep between forward and backward, the most at once, over all
                                     micro-batches under way: what a block made in its forward and is still alive after it, and
                                     its input; not embedding, final norm and head (parallel/activations.py counts so too)
    sent                             per kind of collective over more than one rank: calls; payload (the whole tensor that is
                                     gathered, scattered, summed or sent); and `ring`, the bytes that leave a rank if it is done
                                     around a ring: payload (n-1)/n over n ranks, an all-reduce twice that, a message once;
                                     the pieces of an all-to-all are taken for equal
    flops                            of matrix products (aten.mm, addmm, bmm), recomputed ones included; attention's are not in it

One step is counted, the second: in the first, buffers are made and DDP learns its buckets. The step goes from the objective's
count to the end of the optimizer's update. What is counted depends on shapes alone, but for one thing: where the machine is
busy a thread of gloo may hold a buffer for a moment longer, and `kept` counts it.
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.stage import PipelineStage
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from windlass.config import RunConfig
from windlass.report.events import read_events
from windlass.training import loop as train
from windlass.training.run import Run

COUNTED_STEP = 2
KINDS = {
    "allgather_base": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall_base": "all-to-all",
    "all_to_all_single": "all-to-all",
    "send": "send",
}
RING = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1}  # times payload (n-1)/n
Storages = dict[int, StorageWeakRef]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory this rank holds; of a weight in fp8 its codes, which it shows in the dtype of its products."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(tensor, "_data", tensor)


def num_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors if tensor is not None)


def bytes_of(weak: StorageWeakRef) -> int:
    """What a storage takes now: FSDP empties those that it gathered into, inside a block too, and keeps them."""
    storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return 0 if storage is None else storage.nbytes()


class Made(TorchDispatchMode):
    """Storages that operators made, by weak references."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: Storages = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                note(self.storages, tensor)
        return result


def note(storages: Storages, tensor: torch.Tensor) -> int:
    weak = StorageWeakRef(local(tensor).untyped_storage())
    storages.setdefault(weak.cdata, weak)
    return weak.cdata


class Step(TorchDispatchMode):
    """Collectives by kind, and the FLOPs of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, dict[str, int]] = {}
        self.flops = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor first: what it does with its parts comes here again, the collectives too
        result = function(*args, **(kwargs or {}))
        space, _, name = function._schema.name.partition("::")
        kind = KINDS.get(name.strip("_")) if space in ("c10d", "_c10d_functional") else None
        if kind is not None:
            self._note(kind, function, args, result)
        elif space == "aten" and name in ("mm", "addmm", "bmm"):
            self.flops += 2 * args[-2].numel() * args[-1].shape[-1]
        return result

    def _note(self, kind: str, function: Any, args: Any, result: Any) -> None:
        size = group_of(function, args).size()
        if size == 1:
            return
        tensors = [one for one in tree_leaves([args, result]) if isinstance(one, torch.Tensor)]
        payload = max(tensor.nbytes for tensor in tensors)  # the gathered, the unscattered, the summed, the sent
        if kind == "all-to-all":
            payload = args[1].nbytes  # what this rank sends: rows come in other numbers
        row = self.sent.setdefault(kind, {"calls": 0, "payload": 0, "ring": 0})
        row["calls"] += 1
        row["payload"] += payload
        row["ring"] += payload if kind == "send" else RING[kind] * payload * (size - 1) // size


def group_of(function: Any, args: Any) -> dist.ProcessGroup:
    """The group that an operator of c10d or of the functional collectives is called over."""
    for argument, value in zip(function._schema.arguments, args):
        if argument.name == "group_name":
            return dist.distributed_c10d._resolve_process_group(value)
        if argument.name == "process_group":
            return dist.ProcessGroup.unbox(value)
    raise AssertionError(f"{function} names no group")


class Meter:
    """Counts in `run`, whose program, source and optimizer call it at their own places."""

    def __init__(self, run: Run):
        self._run = run
        self._parts = getattr(run.program, "parts", None) or [run.program.model]
        self._alive: Storages = {}
        self._step, self._is_counting = 0, False
        self.counts = Step()
        self.found: dict[str, int] = dict.fromkeys(("gathered", "whole_gradients", "kept"), 0)
        for part in self._parts:
            for block in part.blocks:
                block.forward = self._metered(block, block.forward)
            for unit in (module for module in part.modules() if isinstance(module, FSDPModule)):
                unit.register_forward_pre_hook(lambda *_: self._look())  # after FSDP's own, which gathers
        self._next, self._update = run.source.next, run.optimizer.step
        run.source.next, run.optimizer.step = self._begin, self._end

    def _begin(self, *args: Any) -> Any:
        self._step += 1
        if self._step == COUNTED_STEP:
            self._is_counting = True
            self.counts.__enter__()
        return self._next(*args)

    def _end(self, norm: torch.Tensor) -> None:
        if not self._is_counting:
            return self._update(norm)
        parameters = [record.tensor for record in self._run.program.records()]
        self.found["gradients"] = num_bytes(parameter.grad for parameter in parameters)
        self._update(norm)
        self.counts.__exit__(None, None, None)
        self._is_counting = False
        states = self._run.optimizer.state_tensors().items()
        self.found["parameters"] = num_bytes(parameters)
        self.found["states"] = num_bytes(tensor for name, tensor in states if not name.endswith(".step"))

    def _metered(self, block: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def metered(*args: Any, **kwargs: Any) -> Any:
            if not (self._is_counting and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            with Made() as made:
                out = forward(*args, **kwargs)
            own = {note({}, parameter) for part in self._parts for parameter in part.parameters()}
            note(made.storages, args[0])
            for tensor in tree_leaves(out):
                made.storages.pop(note(made.storages, tensor))  # the next block's input
            self._alive |= {key: value for key, value in made.storages.items() if key not in own}
            self._look()
            return out

        return metered

    def _look(self) -> None:
        """What is held now; the most is kept."""
        if not (self._is_counting and torch.is_grad_enabled()):
            return
        self._alive = {key: weak for key, weak in self._alive.items() if not weak.expired()}
        shards = {local(record.tensor).untyped_storage().data_ptr() for record in self._run.program.records()}
        parameters = [one for part in self._parts if isinstance(part, FSDPModule) for one in part.parameters()]
        whole = [one for one in parameters if local(one).untyped_storage().data_ptr() not in shards]
        now = {
            "kept": sum(map(bytes_of, self._alive.values())),
            "gathered": num_bytes(whole),
            "whole_gradients": num_bytes(one.grad for one in whole),
        }
        self.found |= {name: max(value, self.found[name]) for name, value in now.items()}


@contextlib.contextmanager
def logged(log: list[tuple[str, int, int]]) -> Any:
    """What the stages of a pipeline run on this rank, in order: (F forward, B backward, I and W its halves; stage; chunk)."""
    forward, backward = PipelineStage.forward_one_chunk, PipelineStage.backward_one_chunk
    weight = PipelineStage.backward_weight_one_chunk

    def run_forward(self: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
        log.append(("F", self.stage_index, chunk))
        return forward(self, chunk, *args, **kwargs)

    def run_backward(
        self: Any, chunk: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        log.append(("B" if full_backward else "I", self.stage_index, chunk))
        return backward(self, chunk, loss, full_backward, last_backward)

    def run_weight(self: Any, chunk: int, last_backward: bool = False) -> Any:
        log.append(("W", self.stage_index, chunk))
        return weight(self, chunk, last_backward)

    patched = {"forward_one_chunk": run_forward, "backward_one_chunk": run_backward}
    with mock.patch.multiple(PipelineStage, **patched, backward_weight_one_chunk=run_weight):
        yield


def measure(config: RunConfig) -> dict[str, Any]:
    """On one of the ranks: `windlass train`'s job on `config`, its data prepared -> what this rank kept and sent in a step, the
    losses of all steps, and what a pipeline's stages ran in the first."""
    log: list[tuple[str, int, int]] = []
    meters: list[Meter] = []
    original = train.assemble

    def assemble(*args: Any, **more: Any) -> Run:
        run = original(*args, **more)
        meters.append(Meter(run))
        return run

    with (
        open(os.devnull, "w") as silence,
        contextlib.redirect_stdout(silence),
        mock.patch.object(train, "assemble", assemble),
        logged(log),
    ):
        train.train(config)
    events = read_events(config.run.directory / "events.jsonl")
    losses = [event["loss"] for event in events if event["kind"] == "step"]
    found = {**meters[0].found, "flops": meters[0].counts.flops, "sent": meters[0].counts.sent, "losses": losses}
    return found | ({"log": log[: len(log) // len(losses)]} if log else {})
