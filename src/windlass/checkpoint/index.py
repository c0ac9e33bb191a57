"""index.json: which tensors a checkpoint holds, and where the bytes of each chunk are. No torch.

name -> dtype, shape, chunks; a chunk is a box of the tensor (offsets, sizes) whose bytes begin at `at` of `file`,
row-major.
"""

import math
from itertools import pairwise
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from windlass.checkpoint.hashed_file import Count
from windlass.checkpoint.manifest import INDEX, SCHEMA, Manifest
from windlass.checkpoint.sealed_json import bad, seal, unseal
from windlass.checkpoint.verify import Checkpoint

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip

Shape = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 48)]], Field(max_length=16)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Chunk(_Record):
    offsets: Shape
    sizes: Shape
    file: str
    at: Count


class SavedTensor(_Record):
    dtype: Annotated[str, Field(pattern=f"^({'|'.join(ITEM_BYTES)})$")]
    shape: Shape
    chunks: list[Chunk]

    def num_bytes(self, chunk: Chunk) -> int:
        return math.prod(chunk.sizes) * ITEM_BYTES[self.dtype]


class _Index(_Record):
    schema_version: int
    token: str
    tensors: dict[str, SavedTensor]


def seal_index(tensors: dict[str, SavedTensor], token: str) -> bytes:
    return seal(_Index(schema_version=SCHEMA, token=token, tensors=tensors).model_dump())


def parse_index(data: bytes, manifest: Manifest) -> dict[str, SavedTensor]:
    """The tensors, or BadCheckpoint where a field is not what it must be or points outside a tensor or a file."""
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
        _check(name[:80], tensor, manifest)
    _check_apart(index.tensors)
    return index.tensors


def _check(name: str, tensor: SavedTensor, manifest: Manifest) -> None:
    for chunk in tensor.chunks:
        same_rank = len(chunk.offsets) == len(chunk.sizes) == len(tensor.shape)
        if not same_rank or any(o + s > d for o, s, d in zip(chunk.offsets, chunk.sizes, tensor.shape)):
            raise bad(
                f"{INDEX}: {name!r}: {chunk.offsets} + {chunk.sizes} is not in {tensor.shape}", "chunks tile a tensor"
            )
        if chunk.file not in manifest.files:
            raise bad(f"{INDEX}: {name!r} is in the file {chunk.file[:80]!r}", "MANIFEST lists every file")
        end, size = chunk.at + tensor.num_bytes(chunk), manifest.files[chunk.file].size
        if end > size:
            raise bad(f"{INDEX}: {name!r} ends at byte {end} of {chunk.file}", f"that file has {size} bytes")
    volume, starts = sum(math.prod(chunk.sizes) for chunk in tensor.chunks), {tuple(c.offsets) for c in tensor.chunks}
    if volume != math.prod(tensor.shape) or len(starts) != len(tensor.chunks):
        raise bad(f"{INDEX}: the chunks of {name!r} do not make up its shape {tensor.shape}", "chunks tile a tensor")


def _check_apart(tensors: dict[str, SavedTensor]) -> None:
    """BadCheckpoint where two chunks share bytes."""
    spans = [
        (c.file, c.at, c.at + t.num_bytes(c), name) for name, t in tensors.items() for c in t.chunks if t.num_bytes(c)
    ]
    spans.sort()
    for (file, _, end, name), (next_file, start, _, next_name) in pairwise(spans):
        if file == next_file and start < end:
            raise bad(
                f"{INDEX}: {next_name[:80]!r} shares bytes of {file} with {name[:80]!r}", "two chunks share no byte"
            )


def read_index(checkpoint: Checkpoint) -> dict[str, SavedTensor]:
    return parse_index(checkpoint.read(INDEX), checkpoint.manifest)
