"""Which tensors a checkpoint holds, and where the bytes of each part are. No torch.

    index.json         name -> dtype, shape, grids: which rank's file holds which box (grid.py). A few numbers per tensor, for any
                       number of ranks
    rank-00003.bin     at its beginning, name -> offsets and sizes of its box, in the order in which the boxes follow

A reader looks into index.json, and then into the files of the ranks that hold what it wants.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Final

from pydantic import Field, TypeAdapter, ValidationError

from windlass.checkpoint.grid import Box, Grid, JsonRecord, RankPart, Shape, TooIrregular, overlap
from windlass.checkpoint.manifest import INDEX, SCHEMA, Manifest
from windlass.checkpoint.sealed_json import bad, parse_strict, seal, unseal
from windlass.checkpoint.verify import Checkpoint

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class SavedTensor(JsonRecord):
    dtype: Annotated[str, Field(pattern=f"^({'|'.join(ITEM_BYTES)})$")]
    shape: Shape
    grids: Annotated[tuple[Grid, ...], Field(strict=False)]

    @property
    def whole(self) -> Box:
        return Box((0,) * len(self.shape), self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_bytes_of(self.whole)

    def num_bytes_of(self, box: Box) -> int:
        return box.num_elements * ITEM_BYTES[self.dtype]

    def parts(self) -> Iterator[RankPart]:
        """All of them."""
        for grid in self.grids:
            yield from grid.parts()

    def meeting(self, box: Box) -> Iterator[RankPart]:
        """The parts that share elements with `box`."""
        for grid in self.grids:
            yield from grid.meeting(box)

    def holder(self, box: Box) -> int | None:
        """The rank whose part is `box`."""
        return next((part.rank for part in self.meeting(box) if part.box == box), None)


class _Index(JsonRecord):
    schema_version: int
    token: str
    tensors: dict[str, SavedTensor]


_BOX: Final = TypeAdapter(tuple[Shape, Shape])


def seal_index(tensors: Mapping[str, SavedTensor], token: str) -> bytes:
    return seal(_Index.model_construct(schema_version=SCHEMA, token=token, tensors=dict(tensors)).model_dump())


def parse_tensor_index(data: bytes, manifest: Manifest) -> dict[str, SavedTensor]:
    """The tensors, or BadCheckpoint where a field is not what it must be, or the parts of a tensor do not tile it."""
    body = unseal(data, INDEX)
    try:
        index = _Index.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise bad(
            f"{INDEX}: {'.'.join(map(str, first['loc']))[:120]}: {first['msg']}", "its fields are fixed"
        ) from None
    if index.schema_version != SCHEMA:
        raise bad(f"{INDEX}: schema_version is {index.schema_version}", f"this version reads schema {SCHEMA}")
    if index.token != manifest.token:
        raise bad(f"{INDEX}: stale: it belongs to the save {index.token[:40]}", f"this save is {manifest.token}")
    for name, tensor in index.tensors.items():
        _check(name[:80], tensor, manifest.world)
    return index.tensors


def _check(name: str, tensor: SavedTensor, world: int) -> None:
    rule = "parts tile a tensor"
    for grid in tensor.grids:
        is_of_shape = len(grid.offsets) == len(grid.sizes) == len(tensor.shape)
        is_of_shape = is_of_shape and all(axis.dim < len(tensor.shape) for axis in grid.axes)
        if not is_of_shape or 0 in grid.sizes or any(end > size for end, size in zip(grid.ends(), tensor.shape)):
            given = f"{list(grid.offsets)} + {list(grid.sizes)} is not in {list(tensor.shape)}"
            raise bad(f"{INDEX}: {name!r}: {given}", rule)
        if any(axis.step == 0 for axis in grid.axes):
            raise bad(f"{INDEX}: {name!r}: an axis of step 0", rule)
        if grid.last_rank >= world:
            raise bad(f"{INDEX}: {name!r} is in the file of rank {grid.last_rank}", f"{world} ranks saved")
    if sum(grid.num_elements for grid in tensor.grids) != math.prod(tensor.shape):
        raise bad(f"{INDEX}: the parts of {name!r} do not make up its shape {list(tensor.shape)}", rule)
    try:
        box = overlap(tensor.grids)
    except TooIrregular as error:
        raise bad(f"{INDEX}: {name!r}: {error}", rule) from None
    if box is not None:
        raise bad(f"{INDEX}: {name!r}: {list(box.offsets)} + {list(box.sizes)} is in two parts", rule)


def read_tensor_index(checkpoint: Checkpoint) -> dict[str, SavedTensor]:
    return parse_tensor_index(checkpoint.read(INDEX), checkpoint.manifest)


def pack_boxes(boxes: Mapping[str, Box]) -> bytes:
    """The index that begins a rank's file, of its boxes in their order."""
    return json.dumps(boxes, separators=(",", ":")).encode()


def parse_boxes(data: bytes, rank: int, file: str, room: int, tensors: Mapping[str, SavedTensor]) -> dict[str, int]:
    """name -> where its box begins behind the index of `file`, which has `room` bytes there. BadCheckpoint where that is not what
    index.json says of `rank`, or the boxes take other room."""
    starts, at = {}, 0
    for name, value in parse_strict(data, file).items():
        try:
            box = Box(*_BOX.validate_python(value))
        except ValidationError as error:
            where, message = ".".join(map(str, error.errors()[0]["loc"])), error.errors()[0]["msg"]
            raise bad(f"{file}: {name[:80]}: {where}: {message}", "its fields are fixed") from None
        tensor = tensors.get(name)
        if tensor is None or not len(box.offsets) == len(box.sizes) == len(tensor.shape) or tensor.holder(box) != rank:
            raise bad(
                f"{file}: {name[:80]!r} at {list(box.offsets)} is of another rank", f"{INDEX} says who holds what"
            )
        starts[name] = at
        at += tensor.num_bytes_of(box)
    if at != room:
        raise bad(f"{file}: its boxes have {at} bytes", f"{room} bytes are behind the index")
    return starts
