"""A checkpoint's bytes moved into the files of another layout, by one process that never holds more than some blocks of it.

Restoring reads any layout out of any other, so nothing needs this. What it buys: after it each rank reads its own file, from
end to end, where it would otherwise take rows out of many files (S ranks that restore out of T files open up to S T of them,
and a cut by columns reads whole rows on every rank). That pays where one checkpoint starts many runs or restarts often, where
storage is slow at small reads, and on the way to another cluster, where the bytes are copied anyhow.

    read      every byte once, and a piece at a block's border twice; each piece verified before a byte of it is used
    written   every byte once, cut into the pieces that training would write, so that `diff` compares by hashes
    held      FILES_AT_ONCE files with at most IN_FLIGHT + 1 pieces of 4 MiB each; a block of 32 MiB and what is read for it

The new checkpoint is a draft until MANIFEST is written (store.py): a kill leaves the draft, which the next attempt sweeps, never
half of a checkpoint. No torch: the caller gives each rank's parts.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from windlass.checkpoint.hashed_file import PIECE_BYTES, FileEntry, PieceWriter
from windlass.checkpoint.index import Chunk, SavedTensor, read_index, seal_index
from windlass.checkpoint.manifest import INDEX, TRAINER_STATE, Manifest, is_rank_name, new_token, rank_header, rank_name
from windlass.checkpoint.sealed_json import seal, unseal
from windlass.checkpoint.store import Draft, check_space, named_errors, sweep
from windlass.checkpoint.stream import Box, TensorSource, as_bytes
from windlass.checkpoint.verify import Checkpoint, complaint

FILES_AT_ONCE = 16
IN_FLIGHT = 2


class RankPart(NamedTuple):
    """A box of a tensor, and the rank whose file holds it."""

    rank: int
    box: Box


Parts = Mapping[str, list[RankPart]]
"""Tensor name -> its parts, which tile it."""


def reshard(source: Path, target: Path, parts: Parts, num_ranks: int) -> Manifest:
    """Writes the checkpoint at `source` once more, as the step of the same number in the directory `target`, to which no other
    process writes meanwhile. `parts` has every tensor of it; `num_ranks` is the size of the layout. Raises UserError where that
    step is there already, BadCheckpoint where a byte of `source` is not what was written."""
    checkpoint = Checkpoint.open(source)
    if problems := checkpoint.survey():
        raise complaint(source, problems)
    tensors, manifest = read_index(checkpoint), checkpoint.manifest
    assert parts.keys() == tensors.keys(), parts.keys() ^ tensors.keys()
    draft = Draft(target, manifest.step, new_token(manifest.run_id))
    draft.refuse_overwrite()
    sweep(target, manifest.run_id)
    with named_errors(target, manifest.num_bytes):
        target.mkdir(parents=True, exist_ok=True)
        check_space(target, manifest.num_bytes)
        draft.create()
        try:
            with TensorSource(checkpoint) as opened:
                entries, moved = _move(opened, tensors, parts, draft)
            for name, content in _other_files(checkpoint, draft.token):
                entries[name] = draft.add(name, content)
            entries[INDEX] = draft.add(INDEX, seal_index(moved, draft.token))
            return draft.commit(manifest.run_id, num_ranks, manifest.metric, entries)
        finally:
            draft.discard()  # does nothing after the commit, which has renamed it


def _other_files(checkpoint: Checkpoint, token: str) -> Iterator[tuple[str, bytes]]:
    """Everything but the tensors, verified; the trainer state gets the token of this save."""
    for name in sorted(checkpoint.manifest.files):
        if name == TRAINER_STATE:
            yield name, seal({**unseal(checkpoint.read(name), name), "token": token})
        elif name != INDEX and not is_rank_name(name):
            yield name, checkpoint.read(name)


def _move(
    source: TensorSource, tensors: Mapping[str, SavedTensor], parts: Parts, draft: Draft
) -> tuple[dict[str, FileEntry], dict[str, SavedTensor]]:
    """Writes all ranks' files, some at a time -> their entries in the manifest and in the index."""
    entries: dict[str, FileEntry] = {}
    chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
    ranks = sorted({part.rank for held in parts.values() for part in held if part.box.num_elements})
    for start in range(0, len(ranks), FILES_AT_ONCE):
        some = ranks[start : start + FILES_AT_ONCE]
        with ExitStack() as stack:
            files = {rank: _File(stack.enter_context(_writer(draft, rank)), draft.token) for rank in some}
            for name, tensor in tensors.items():
                own = [part for part in parts[name] if part.rank in files and part.box.num_elements]
                for part, at in _copy(source, tensor, own, files):
                    offsets, sizes = list(part.box.offsets), list(part.box.sizes)
                    chunks[name].append(Chunk(offsets=offsets, sizes=sizes, file=rank_name(part.rank), at=at))
            entries |= {rank_name(rank): file.close() for rank, file in files.items()}
    return entries, {name: tensor.model_copy(update={"chunks": chunks[name]}) for name, tensor in tensors.items()}


def _writer(draft: Draft, rank: int) -> PieceWriter:
    return PieceWriter(draft.directory / rank_name(rank), in_flight=IN_FLIGHT)


def _copy(
    source: TensorSource, tensor: SavedTensor, parts: Iterable[RankPart], files: Mapping[int, "_File"]
) -> Iterator[tuple[RankPart, int]]:
    """The parts of one tensor into their files -> each with the byte at which it begins. Parts of the same rows (a cut by
    columns) are read together, so that a row is read once for all of them."""
    same_rows: dict[tuple[int, ...], list[RankPart]] = {}
    for part in parts:
        rows = (part.box.offsets[0], part.box.sizes[0]) if tensor.shape else ()
        same_rows.setdefault(rows, []).append(part)
    for together in same_rows.values():
        yield from [(part, files[part.rank].begin()) for part in together]
        for block, data in source.blocks(tensor, _around([part.box for part in together])):
            for part in together:
                shared = part.box.common(block)
                if shared.num_elements:
                    files[part.rank].write(as_bytes(data[shared.within(block)]))
        for part in together:
            files[part.rank].end()


def _around(boxes: list[Box]) -> Box:
    """The smallest box that holds all of them."""
    first = tuple(map(min, zip(*(box.offsets for box in boxes))))
    ends = map(max, zip(*([o + s for o, s in zip(box.offsets, box.sizes)] for box in boxes)))
    return Box(first, tuple(end - start for end, start in zip(ends, first)))


class _File:
    """A rank's file: takes blocks of any size and writes pieces of PIECE_BYTES; each part begins a new piece."""

    def __init__(self, writer: PieceWriter, token: str):
        self._writer = writer
        self._piece = bytearray()
        writer.write(memoryview(rank_header(token)))

    def begin(self) -> int:
        """Where the part that begins now is written."""
        assert not self._piece, "the last part has ended"
        return self._writer.size

    def write(self, data: memoryview) -> None:
        while data:
            room = PIECE_BYTES - len(self._piece)
            self._piece += data[:room]
            data = data[room:]
            if len(self._piece) == PIECE_BYTES:
                self.end()

    def end(self) -> None:
        if self._piece:
            self._writer.write(memoryview(self._piece))
            self._piece = bytearray()  # the old one is the writer's until it is hashed and written

    def close(self) -> FileEntry:
        return self._writer.close()
