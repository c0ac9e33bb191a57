"""DCP's StorageWriter and StorageReader over the commit protocol: raw tensor bytes, JSON, no pickle.

DCP's planners decide which rank writes which chunk (a replicated tensor is written once) and which saved chunks make
up a local shard in another layout; both work on metadata alone. This file turns their plans into bytes.

    rank-00003.bin   64 bytes of header, then the chunks of rank 3 one after the other, row-major, as in memory
    index.json       name -> dtype, shape, chunks: offsets and sizes in the tensor, file and byte where they begin

Bytes written: each chunk once, hashed as it is written. Bytes read per rank: the rows that its shard needs of each
chunk it overlaps, rounded out to pieces of at most 4 MiB, each verified before a byte of it reaches a tensor. In the
layout that saved, that is the rank's own file.

Only tensors are stored. Objects (DCP would pickle them) are refused: the trainer state is JSON (checkpoints.py).
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from windlass.checkpoint.hashed_file import FileEntry, PieceReader, PieceWriter
from windlass.checkpoint.index import ITEM_BYTES, Chunk, SavedTensor, parse_index, seal_index
from windlass.checkpoint.manifest import HEADER_BYTES, INDEX, Manifest, new_token, rank_header, rank_name
from windlass.checkpoint.sealed_json import digest
from windlass.checkpoint.store import Draft, check_space, named_errors
from windlass.checkpoint.verify import Checkpoint

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
assert set(DTYPES) == set(ITEM_BYTES)

Entries = dict[str, FileEntry]
"""A file's name -> its entry in MANIFEST."""


class StoredPlace(NamedTuple):
    """Where a chunk's bytes begin. `entry`, on a file's first chunk only, is the file's entry in MANIFEST."""

    file: str
    at: int
    entry: FileEntry | None = None


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order; a copy only where it is not on the CPU or not contiguous."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def chunk_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


class TensorWriter(StorageWriter):
    """Writes one checkpoint of step `step` into `checkpoints`, and commits it in `finish`.

    `files` (rank 0's are used) is called with the token and gives the other files of the checkpoint. `manifest` is
    there after `finish`, on rank 0. `draft` is there from the global plan on; discard it if the save fails.
    """

    def __init__(
        self,
        checkpoints: Path,
        step: int,
        run_id: str,
        files: Callable[[str], dict[str, bytes | Path]],
        metric: float | None = None,
        digest: Callable[[Any], str] = digest,
    ):
        self._checkpoints, self._step, self._run_id = checkpoints, step, run_id
        self._files, self._metric, self._digest = files, metric, digest
        self._rank = 0
        self.draft: Draft | None = None
        self.manifest: Manifest | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        self.draft = self.manifest = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = int(kwargs.get("rank") or 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise TypeError(f"{item.index.fqn} is not a tensor; put it into the trainer state")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Rank 0: is there space, and make the draft. Every rank learns the token through its plan."""
        token = self.begin(sum(chunk_bytes(item) for plan in plans for item in plan.items))
        return [dataclasses.replace(plan, storage_data=token) for plan in plans]

    def begin(self, tensor_bytes: int) -> str:
        """Rank 0: is there space for the tensors and the other files, and make the draft -> its token."""
        token = new_token(self._run_id)
        files = self._files(token)
        need = sum(len(content) if isinstance(content, bytes) else content.stat().st_size for content in files.values())
        need += tensor_bytes
        draft = Draft(self._checkpoints, self._step, token)
        with named_errors(self._checkpoints, need):
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            check_space(self._checkpoints, need)
            draft.create()
        self.draft = draft
        return token

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.draft = Draft(self._checkpoints, self._step, plan.storage_data)
        name, results = rank_name(self._rank), []
        if not plan.items:
            return _done([])  # a rank without a chunk has no file
        need = sum(chunk_bytes(item) for item in plan.items)
        with named_errors(self._checkpoints, need), PieceWriter(self.draft.directory / name, self._digest) as writer:
            writer.write(memoryview(rank_header(self.draft.token)))
            for item in plan.items:
                data = raw_bytes(planner.resolve_data(item))  # type: ignore[arg-type]  # no BytesIO: refused in the plan
                place = StoredPlace(name, writer.write(data))
                results.append(WriteResult(item.index, len(data), place))
            entry = writer.close()
        first = results[0]
        results[0] = dataclasses.replace(first, storage_data=first.storage_data._replace(entry=entry))
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """As dcp.save calls it, with what every rank's write_data returned."""
        tensors = saved_tensors(metadata, [result for rank in results for result in rank])
        entries = {name: entry for rank in results for name, entry in entries_of(rank).items()}
        self.commit(tensors, entries, len(results))

    def commit(self, tensors: dict[str, SavedTensor], entries: Entries, world: int) -> None:
        """Rank 0, when every rank's file is on disk: index, other files, MANIFEST, commit. `entries`: of the ranks' files."""
        assert self.draft is not None
        files: dict[str, bytes | Path] = dict(self._files(self.draft.token))
        files[INDEX] = seal_index(tensors, self.draft.token)
        with named_errors(self._checkpoints, sum(entry.size for entry in entries.values())):
            entries = entries | {name: self.draft.add(name, content) for name, content in sorted(files.items())}
            self.manifest = self.draft.commit(self._run_id, world, self._metric, entries)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def entries_of(results: list[WriteResult]) -> Entries:
    """The entry of the file that a rank has written; none of a rank without a chunk."""
    return {place.file: place.entry for result in results if (place := result.storage_data).entry}


def saved_tensors(metadata: Metadata, results: list[WriteResult]) -> dict[str, SavedTensor]:
    """Of the index: every tensor, and where the bytes of its chunks are."""
    places = {result.index: result.storage_data for result in results}
    tensors = {}
    for name, saved in metadata.state_dict_metadata.items():
        assert isinstance(saved, TensorStorageMetadata)
        chunks = []
        for chunk in saved.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            chunks.append(Chunk(offsets=list(chunk.offsets), sizes=list(chunk.sizes), file=place.file, at=place.at))
        dtype = str(saved.properties.dtype).removeprefix("torch.")
        tensors[name] = SavedTensor(dtype=dtype, shape=list(saved.size), chunks=chunks)
    return tensors


def _metadata(tensors: dict[str, SavedTensor]) -> Metadata:
    state: dict[str, Any] = {}
    places: dict[MetadataIndex, StoredPlace] = {}
    for name, saved in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in saved.chunks]
        state[name] = TensorStorageMetadata(
            TensorProperties(dtype=DTYPES[saved.dtype]), torch.Size(saved.shape), chunks
        )
        places |= {MetadataIndex(name, chunk.offsets): StoredPlace(chunk.file, chunk.at) for chunk in saved.chunks}
    return Metadata(state, storage_data=places)


class TensorReader(StorageReader):
    """Reads tensors out of a checkpoint whose MANIFEST is whole. `index_bytes`: index.json, if rank 0 read it for all."""

    def __init__(self, checkpoint: Checkpoint, index_bytes: bytes | None = None):
        self._checkpoint = checkpoint
        self._index_bytes = index_bytes
        self._saved: Metadata | None = None
        self.num_bytes_read = 0

    def reset(self, checkpoint_id: Any = None) -> None:
        self.num_bytes_read = 0

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        data = self._index_bytes if self._index_bytes is not None else self._checkpoint.read(INDEX)
        return _metadata(parse_index(data, self._checkpoint.manifest))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._saved = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._saved is not None
        by_file: dict[str, list[tuple[int, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            assert item.type != LoadItemType.BYTE_IO
            place = self._saved.storage_data[item.storage_index]
            by_file[place.file].append((place.at, item))
        for file, items in sorted(by_file.items()):
            with self._checkpoint.reader(file) as reader:
                reader.check_size()
                reader.read(0, HEADER_BYTES)  # no tensor is there, but a whole file is whole everywhere
                for at, item in sorted(items, key=lambda pair: pair[0]):
                    self._read_item(reader, at, item, planner)
        return _done(None)

    def _read_item(self, reader: PieceReader, at: int, item: ReadItem, planner: LoadPlanner) -> None:
        """The rows that are needed, verified, narrowed to the columns that are needed, copied into the tensor."""
        if 0 in item.lengths:
            return
        assert self._saved is not None
        saved = self._saved.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(saved, TensorStorageMetadata)
        dtype = saved.properties.dtype
        sizes = next(chunk.sizes for chunk in saved.chunks if chunk.offsets == item.storage_index.offset)
        rows = item.lengths[0] if sizes else 1
        row_bytes = math.prod(sizes[1:]) * dtype.itemsize
        first_row = item.storage_offsets[0] if sizes else 0
        data = reader.read(at + first_row * row_bytes, rows * row_bytes)
        self.num_bytes_read += len(data)
        tensor = torch.frombuffer(data, dtype=dtype).view(rows, *sizes[1:])
        tensor = tensor if sizes else tensor[0]
        for dim in range(1, len(sizes)):
            tensor = tensor.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
