"""What ranks run for test_hf_memory: FSDP2 shards filled from a directory, with memory and storage reads watched."""

import threading
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from windlass.model.config import ModelConfig
from windlass.model.hf import load_weights
from windlass.model.open_config import architecture_of
from windlass.model.transformer import Decoder


def anonymous_bytes() -> int:
    """RssAnon: memory that no file backs. Mapped files are the page cache's, shared by all ranks."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def storage_bytes() -> int:
    """Bytes that this process made the storage deliver, page faults of mapped files among them (proc(5))."""
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])


class Peak:
    """The largest anonymous_bytes between enter and exit, looked at as often as the interpreter lets a thread run."""

    def __enter__(self):
        self.start = self.bytes = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.is_set():
            self.bytes = max(self.bytes, anonymous_bytes())
            self._stop.wait(0.0005)

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self.bytes = max(self.bytes, anonymous_bytes())


def load_watched(path: str) -> dict[str, int]:
    """On each rank -> bytes: its own share, growth of RssAnon over the load, what storage delivered, a sum to compare."""
    arch = architecture_of(ModelConfig(**{"from": path}))
    with torch.device("meta"):
        decoder = Decoder(arch)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for part in [*decoder.blocks, decoder]:
        fully_shard(part, mesh=mesh)
    torch.distributed.barrier()
    read = storage_bytes()
    with Peak() as peak:
        decoder.to_empty(device="cpu")
        decoder.tie()
        load_weights(path, arch, dict(decoder.named_parameters()))
    torch.distributed.barrier()
    locals_ = [parameter.detach().to_local() for parameter in decoder.parameters()]
    return {
        "share": sum(part.nbytes for part in locals_),
        "growth": peak.bytes - peak.start,
        "read": storage_bytes() - read,
        "sum": float(sum(part.double().sum() for part in locals_)),
    }
