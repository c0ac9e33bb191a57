"""Safetensors files whose tensors arrive one by one, in any order and in parts.

A file begins with a header of JSON that says where each tensor's bytes are; names, shapes and so all offsets follow from the
architecture. A tensor is written at its offset as soon as its last part has come. Memory is the tensors that have come in part.

    8 bytes: length of the header, little-endian | header, filled with blanks to a multiple of 8 | bytes of the tensors
                                                          (github.com/huggingface/safetensors, "Format")
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from windlass.hub.client import INDEX, SINGLE
from windlass.model.architecture import Architecture, parameter_shapes
from windlass.model.names import VOCABULARY, Stored, stored_bytes, stored_shapes, stored_tensor

DTYPE_NAMES: Final = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class ShardWriter:
    """The weights of one model in `directory`, as `dtype`, in files of at most `max_shard_bytes` of tensors."""

    def __init__(self, directory: Path, arch: Architecture, dtype: torch.dtype, max_shard_bytes: int):
        self._directory, self._arch, self._dtype = directory, arch, dtype
        self._shapes = stored_shapes(arch)
        shards = _plan_shards(self._shapes, dtype.itemsize, max_shard_bytes)
        self._files = _shard_names(len(shards))
        self._file_of = {name: file for file, names in zip(self._files, shards, strict=True) for name in names}
        self._waiting: dict[str, set[int]] = {stored: set() for stored in self._shapes}
        for name in parameter_shapes(arch):
            where = stored_tensor(name, arch)
            for stored in where.names:
                self._waiting[stored].add(where.first)
        self._begun: dict[str, Tensor] = {}
        self._offsets: dict[str, int] = {}
        for file, names in zip(self._files, shards, strict=True):
            self._offsets |= _begin_file(directory / file, {name: self._shapes[name] for name in names}, dtype)

    def add(self, name: str, full: Tensor) -> None:
        """`full`: the whole parameter, its vocabulary padded or not."""
        where = stored_tensor(name, self._arch)
        if name in VOCABULARY:
            full = full[: self._arch.vocab_size]
        for index, stored in enumerate(where.names):
            self._add_to(stored, where, full[index] if where.experts else full)

    def _add_to(self, stored: str, where: Stored, full: Tensor) -> None:
        assert where.first in self._waiting[stored], f"{stored} came twice"
        if stored not in self._begun:
            self._begun[stored] = torch.empty(self._shapes[stored], dtype=self._dtype)
        part = self._begun[stored].narrow(1 if where.transposed else 0, where.first, full.shape[0])
        part.copy_(full.T if where.transposed else full)
        self._waiting[stored].remove(where.first)
        if not self._waiting[stored]:
            with open(self._directory / self._file_of[stored], "r+b") as file:
                file.seek(self._offsets[stored])
                file.write(self._begun.pop(stored).view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """Call it after the last parameter: writes an index where there are several files."""
        left = sorted(name for name, parts in self._waiting.items() if parts)
        assert not left, f"parameters that never came: {left}"
        if len(self._files) > 1:
            size = sum(stored_bytes(shape, self._dtype.itemsize) for shape in self._shapes.values())
            write_json(self._directory / INDEX, {"metadata": {"total_size": size}, "weight_map": self._file_of})


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON with the indent and the final newline of transformers' own files."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _begin_file(file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, int]:
    """Writes its header -> where in the file each tensor begins."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name, shape in shapes.items():
        starts[name], end = end, end + stored_bytes(shape, dtype.itemsize)
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [starts[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    return {name: 8 + len(text) + start for name, start in starts.items()}


def _plan_shards(shapes: Mapping[str, tuple[int, ...]], item_bytes: int, max_shard_bytes: int) -> list[list[str]]:
    """Stored tensors in order, cut before one that would exceed the limit; a larger tensor is a shard of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = stored_bytes(shape, item_bytes)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]
