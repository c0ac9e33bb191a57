"""Weights in from a local Hugging Face directory (or the hub's cache), and out to one.

In: safetensors files are mapped, not read; each parameter copies only the rows that this rank holds out of the mapping,
converted to its dtype on the way. Memory is the rank's own part; the ranks of a host share the page cache, so storage
is read once per host. Every tensor of the file must be expected, and every expected tensor must be there in the right
shape: a model with a hole is not loaded.

Out: the names, shapes and shards (at most 5 GB each) follow from the architecture alone, so parameters may arrive one
by one (model/shard_writer). Memory is one tensor. Padded rows of the vocabulary are neither read nor written.
"""

import contextlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.families.family_table import to_hf
from windlass.model.lora import nf4
from windlass.model.lora.adapter import BLOCK, CODES, SCALES
from windlass.model.names import VOCABULARY, expected_name, stored_shapes, stored_tensor
from windlass.model.open_config import StoredSizes, fewer_rows
from windlass.model.shard_writer import ShardWriter, write_json
from windlass.model.slices import GrownRows
from windlass.model.weight_files import check_stored_head, is_pointer, shortened_list, weight_files
from windlass.ranks.owned_part import local_part, owned_ranges

GENERATION: Final = "generation_config.json"
FLOATS: Final = ("F64", "F32", "F16", "BF16")  # safetensors' names of the dtypes that a weight may have
SHARD_BYTES: Final = 5 * 10**9  # transformers' own size of a shard for years; every tool reads it
STORED_HEAD: Final = "the head of a tied model"


@torch.no_grad()
def load_weights(directory: str | Path, arch: Architecture, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` (canonical name -> plain tensor or DTensor, any device, any dtype) from a directory, locally.

    `tensors` may be a part of the model. Matrices in NF4 (`codes` and `scales`) are quantised on the way. Raises UserError for
    a directory without safetensors, a damaged file, tensors that are missing, unexpected, of another shape, or quantised, and a
    tied model's head that is no copy.
    """
    with contextlib.ExitStack() as stack:
        stored = _open_checked(directory, arch, stack)
        for name, tensor in tensors.items():
            module, _, kind = name.rpartition(".")
            if kind == CODES:
                _quantize_into(tensor, tensors[f"{module}.{SCALES}"], f"{module}.weight", arch, stored)
            elif kind != SCALES:
                read_into(local_part(tensor), owned_ranges(tensor), name, arch, stored)


def check_weights(directory: str | Path, arch: Architecture) -> None:
    """Raises UserError for what load_weights would refuse; reads the files' headers, and both ends of a tie that are stored."""
    with contextlib.ExitStack() as stack:
        _open_checked(directory, arch, stack)


def _open_checked(directory: str | Path, arch: Architecture, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Stored tensor's name -> lazy slice of it: exactly the model's."""
    stored = _open_tensors(Path(directory), arch, stack)
    if (rows := fewer_rows(Path(directory), arch.vocab_size)) is not None:
        for name in {stored_tensor(name, arch).name for name in VOCABULARY} | {STORED_HEAD}:
            if name in stored and stored[name].get_shape()[0] == rows:
                stored[name] = GrownRows(stored[name], arch.vocab_size)
    head = stored.pop(STORED_HEAD, None)
    _check_tensors(stored, arch, directory)
    if head is not None:
        check_stored_head(head, stored[stored_tensor(VOCABULARY[0], arch).name], str(directory))
    return stored


def _quantize_into(codes: Tensor, scales: Tensor, name: str, arch: Architecture, stored: dict[str, Any]) -> None:
    """This rank's part of a matrix in NF4: of the same rows and columns of the file's matrix."""
    rows, columns = owned_ranges(scales)
    assert owned_ranges(codes) == [rows, range(columns.start * BLOCK // 2, columns.stop * BLOCK // 2)], name
    ranges = [rows, range(columns.start * BLOCK, columns.stop * BLOCK)]
    part = torch.empty(list(map(len, ranges)))
    read_into(part, ranges, name, arch, stored)
    for target, values in zip((codes, scales), nf4.quantize(part), strict=True):
        local_part(target).copy_(values)


def read_into(local: Tensor, ranges: list[range], name: str, arch: Architecture, stored: dict[str, Any]) -> None:
    """Copy the box `ranges` of one parameter into `local`; padded rows become 0. `stored`: the files' tensors, or lazy slices of
    them, by name."""
    source = VOCABULARY[0] if arch.tied and name == VOCABULARY[1] else name  # a tied head apart from its embedding
    where = stored_tensor(source, arch)
    rows = ranges[0]
    if name in VOCABULARY:
        rows = rows[: max(0, arch.vocab_size - rows.start)]
        local[len(rows) :] = 0.0
    if not rows:
        return
    if where.experts:
        for at, expert in enumerate(rows):
            local[at] = stored[where.of_expert(expert)][tuple(slice(part.start, part.stop) for part in ranges[1:])]
        return
    index = (
        slice(where.first + rows.start, where.first + rows.stop),
        *(slice(part.start, part.stop) for part in ranges[1:]),
    )
    piece = stored[where.name][index[::-1] if where.transposed else index]
    local[: len(rows)] = piece.T if where.transposed else piece


def stored_sizes(directory: Path) -> StoredSizes:
    """What the files' headers state; a header that states more than its file has is refused. Raises UserError."""
    shapes = []
    with contextlib.ExitStack() as stack:
        for file in weight_files(directory):
            opened = _open_file(file, stack)
            shapes += [opened.get_slice(key).get_shape() for key in opened.keys()]  # noqa: SIM118  it is no dict
    return StoredSizes(len(shapes), sum(map(math.prod, shapes)))


def _open_file(file: Path, stack: contextlib.ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        if isinstance(error, SafetensorError) and is_pointer(file):
            raise UserError(
                f"{file} is a git-LFS pointer, not the weights",
                "git without git-lfs leaves a text of three lines in place of each large file",
                "run `git lfs pull` in that directory, or fetch the repository with `hf download`",
            ) from None
        raise UserError(
            f"{file}: {error}",
            "a safetensors file is as long as its header says",
            "copy or download this file again",
        ) from error


def _open_tensors(directory: Path, arch: Architecture, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Stored tensor's name -> lazy slice of it, over all files of the directory; of a tied model's head under STORED_HEAD."""
    known, stored = stored_shapes(arch), {}
    for file in weight_files(directory):
        opened = _open_file(file, stack)
        for key in opened.keys():  # noqa: SIM118  it is no dict
            name = expected_name(key, arch, known)
            if name is not None:
                stored[STORED_HEAD if arch.tied and name == VOCABULARY[1] else name] = opened.get_slice(key)
    return stored


def _check_tensors(stored: dict[str, Any], arch: Architecture, directory: str | Path) -> None:
    """Raise UserError unless the files hold exactly the model's tensors, in its shapes and in floating point."""
    expected = stored_shapes(arch)
    missing = [name for name in expected if name not in stored]
    unexpected = [name for name in stored if name not in expected]
    for what, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            raise UserError(
                f"{directory}: {len(names)} tensors are {what}: {shortened_list(names)}",
                f"a {arch.family} model of this config has exactly {len(expected)} tensors",
                "check that config.json and the weights belong together, and that the recipe overrides no size",
            )
    shapes = {name: tuple(stored[name].get_shape()) for name in expected}
    wrong = [f"{name} {shapes[name]}, not {shape}" for name, shape in expected.items() if shapes[name] != shape]
    if wrong:
        raise UserError(
            f"{directory}: {len(wrong)} tensors have another shape: {shortened_list(wrong)}",
            "shapes follow from config.json and the recipe's overrides",
            "check that config.json and the weights belong together, and that the recipe overrides no size",
        )
    others = [f"{name} ({stored[name].get_dtype()})" for name in expected if stored[name].get_dtype() not in FLOATS]
    if others:
        raise UserError(
            f"{directory}: {len(others)} tensors are not in floating point: {shortened_list(others)}",
            f"weights are read in {', '.join(FLOATS)}; quantised ones would need their scales",
            "take the model's unquantised weights",
        )


@torch.no_grad()
def save_weights(
    directory: str | Path,
    arch: Architecture,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    max_shard_bytes: int = SHARD_BYTES,
    *,
    write: bool = True,
) -> None:
    """Write config.json, generation_config.json and safetensors that transformers loads without a missing key.

    `tensors`: canonical name and full tensor (padded or not), or DTensor, each parameter once; cheapest in the model's
    order. DTensors are gathered one by one: then every rank calls this, and one of them with `write`. The directory
    must hold no weights yet; to replace an export, write a fresh directory and rename it.
    """
    out = Path(directory)
    if write:
        _prepare_directory(out)
    writer = ShardWriter(out, arch, dtype, max_shard_bytes) if write else None
    for name, tensor in tensors:
        full = tensor.detach()
        if isinstance(full, DTensor):
            full = full.full_tensor()
        if writer and not (arch.tied and name == VOCABULARY[1]):
            writer.add(name, full)
    if writer:
        writer.finish()
        kind = str(dtype).removeprefix("torch.")
        write_json(out / "config.json", {**to_hf(arch), "dtype": kind, "torch_dtype": kind})
        ids = {name: value for name, value in to_hf(arch).items() if name.endswith("_token_id") and value is not None}
        write_json(out / GENERATION, {"_from_model_config": True, **ids})


def _prepare_directory(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    present = sorted(file.name for file in directory.glob("*.safetensors*"))
    if present:
        raise UserError(
            f"{directory} already holds weights: {shortened_list(present)}",
            "an export never mixes with older files",
            "give another directory or remove this one",
        )


def keep_sampling(directory: Path, base: bytes | None) -> None:
    """Sampling settings that the base model's authors gave (the bytes of their generation config) stay in that of `directory`,
    with its own token ids."""
    try:
        kept = json.loads(base) if base is not None else {}
    except ValueError:
        return  # save_weights has derived it from the config
    if kept:
        own = json.loads((directory / GENERATION).read_text("utf-8"))
        write_json(directory / GENERATION, {**kept, **{key: own[key] for key in own if key != "_from_model_config"}})
