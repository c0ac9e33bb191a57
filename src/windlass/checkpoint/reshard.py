"""A checkpoint's bytes moved into the files of another layout, by one process that never holds more than some blocks of it.

Restoring reads any layout out of any other, so nothing needs this. What it buys: after it each rank reads its own file, from
end to end, where it would otherwise take rows out of many files (S ranks that restore out of T files open up to S T of them,
and a cut by columns reads whole rows on every rank). That pays where one checkpoint starts many runs or restarts often, where
storage is slow at small reads, and on the way to another cluster, where the bytes are copied anyhow.

    read      every byte once, and a piece at a block's border twice; each piece verified before a byte of it is used
    written   every byte once, cut into the pieces that training would write, so that `diff` compares by hashes
    held      FILES_AT_ONCE files with at most IN_FLIGHT + 1 pieces of 4 MiB each; a block of 32 MiB and what is read for it

The new checkpoint is a draft until MANIFEST is written (commit.py): a kill leaves the draft, which the next attempt sweeps, never
half of a checkpoint. No torch: the caller gives each rank's parts.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from windlass.checkpoint.commit import Draft, check_space, named_errors, sweep
from windlass.checkpoint.grid import Box, Grid, RankPart, join_all
from windlass.checkpoint.hashed_file import PIECE_BYTES, FileEntry, PieceWriter
from windlass.checkpoint.index import SavedTensor, pack_boxes, read_tensor_index, seal_index
from windlass.checkpoint.manifest import INDEX, TRAINER_STATE, Manifest, is_rank_name, new_token, rank_header, rank_name
from windlass.checkpoint.sealed_json import seal, unseal
from windlass.checkpoint.stream import TensorSource, as_bytes
from windlass.checkpoint.verify import Checkpoint, complaint

FILES_AT_ONCE = 16
IN_FLIGHT = 2


Parts = Mapping[str, list[RankPart]]
"""Tensor name -> its parts, which tile it."""


def reshard(source: Path, target: Path, parts: Parts, num_ranks: int) -> Manifest:
    """Writes the checkpoint at `source` once more, as the step of the same number in the directory `target`, to which no other
    process writes meanwhile. `parts` has every tensor of it; `num_ranks` is the size of the layout. Raises UserError where that
    step is there already, BadCheckpoint where a byte of `source` is not what was written."""
    checkpoint = Checkpoint.open(source)
    if problems := checkpoint.survey():
        raise complaint(source, problems)
    tensors, manifest = read_tensor_index(checkpoint), checkpoint.manifest
    assert parts.keys() == tensors.keys(), parts.keys() ^ tensors.keys()
    draft = Draft(target, manifest.step, new_token(manifest.run_id))
    draft.refuse_overwrite()
    sweep(target, manifest.run_id)
    with named_errors(target, manifest.num_bytes):
        target.mkdir(parents=True, exist_ok=True)
        check_space(target, manifest.num_bytes)
        draft.create()
        try:
            with TensorSource(checkpoint, tensors) as source_tensors:
                entries, moved = _move(source_tensors, parts, draft)
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


def _move(source: TensorSource, parts: Parts, draft: Draft) -> tuple[dict[str, FileEntry], dict[str, SavedTensor]]:
    """Writes all ranks' files, some at a time -> their entries in the manifest, and the index."""
    entries: dict[str, FileEntry] = {}
    held = {name: sorted(part for part in parts[name] if part.box.num_elements) for name in source.tensors}
    boxes: dict[int, dict[str, Box]] = {}
    for name, own in held.items():
        for rank, box in own:
            assert name not in boxes.setdefault(rank, {}), f"two parts of {name} for rank {rank}"
            boxes[rank][name] = box
    ranks = sorted(boxes)
    for start in range(0, len(ranks), FILES_AT_ONCE):
        some = ranks[start : start + FILES_AT_ONCE]
        with ExitStack() as stack:
            files = {rank: _File(stack.enter_context(_writer(draft, rank)), draft.token, boxes[rank]) for rank in some}
            for name in source.tensors:
                _copy(source, name, [part for part in held[name] if part.rank in files], files)
            entries |= {rank_name(rank): file.close() for rank, file in files.items()}
    grids = {name: tuple(join_all([], map(Grid.of, own))) for name, own in held.items()}
    return entries, {name: tensor.changed(grids=grids[name]) for name, tensor in source.tensors.items()}


def _writer(draft: Draft, rank: int) -> PieceWriter:
    return PieceWriter(draft.directory / rank_name(rank), in_flight=IN_FLIGHT)


def _copy(source: TensorSource, name: str, parts: Iterable[RankPart], files: Mapping[int, "_File"]) -> None:
    """The parts of one tensor into their files. Parts of the same rows (a cut by columns) are read together: a row is read once
    for all of them."""
    tensor = source.tensors[name]
    same_rows: dict[tuple[int, ...], list[RankPart]] = {}
    for part in parts:
        rows = (part.box.offsets[0], part.box.sizes[0]) if tensor.shape else ()
        same_rows.setdefault(rows, []).append(part)
    for together in same_rows.values():
        for part in together:
            files[part.rank].begin(name)
        for block, data in source.blocks(name, _around([part.box for part in together])):
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

    def __init__(self, writer: PieceWriter, token: str, boxes: Mapping[str, Box]):
        """`boxes`: what will be written, in its order."""
        index = pack_boxes(boxes)
        writer.write(memoryview(rank_header(token, len(index))))
        writer.write(memoryview(index))
        self._writer, self._piece, self._rest = writer, bytearray(), list(boxes)

    def begin(self, name: str) -> None:
        """The box of this tensor begins."""
        assert not self._piece, "the last part has ended"
        assert self._rest.pop(0) == name, "in the order of the index"

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
