"""PEFT's `modules_to_save`: modules that an adapter's files hold whole beside its factors. adapter.also_train names them here.

    in    modules whose names end with one of modules_to_save, as PEFT matches them
    out   the last part of a module's name where every module that ends with it is trained, else the whole name

PEFT copies both ends of a tied model apart, unless `ensure_weight_tying` is set. Here they are one parameter: files that are read
must hold both ends, alike, and files that are written do.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.names import VOCABULARY, stored_shapes, stored_tensor

EMBEDDING, HEAD = VOCABULARY


def patterns_of(modules: Iterable[str]) -> list[str]:
    """adapter.also_train for modules_to_save."""
    return [f"*{module}.*" for module in modules]


def stored_whole(values: Mapping[str, Tensor], arch: Architecture) -> dict[str, Tensor]:
    """The files' tensors, without a prefix, of the parameters `values`, which are whole and by our names. Raises UserError for
    those that PEFT has no module for."""
    joined: dict[str, list[str]] = {}
    for name in sorted(values, key=lambda one: stored_tensor(one, arch).first):
        joined.setdefault(stored_tensor(name, arch).name, []).append(name)
    files: dict[str, Tensor] = {}
    for stored, names in joined.items():
        where = stored_tensor(names[0], arch)
        parts = [values[name][: arch.vocab_size] if name in VOCABULARY else values[name] for name in names]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        if where.experts or (where.rows and len(whole) != where.rows):
            raise UserError(
                f"adapter.also_train has trained {names[0]}, in PEFT's files a part of {stored}",
                "an adapter of PEFT's holds whole modules: neither experts, nor one of several matrices in a tensor",
                "export the merged model: --merge",
            )
        files[stored] = (whole.T if where.transposed else whole).contiguous()
    if arch.tied and EMBEDDING in values:
        files[HEAD] = files[stored_tensor(EMBEDDING, arch).name].clone()  # safetensors writes no tensor twice
    return files


def module_names(files: Iterable[str], arch: Architecture) -> list[str]:
    """modules_to_save for the tensors of stored_whole."""
    whole = {name.rpartition(".")[0] for name in files}
    modules = {name.rpartition(".")[0] for name in (*stored_shapes(arch), HEAD)}
    ends = {module: module.rpartition(".")[2] for module in whole}
    meant = {end: {module for module in modules if module.endswith(end)} for end in ends.values()}
    return sorted({end if meant[end] <= whole else module for module, end in ends.items()})


def fault(files: Mapping[str, Tensor], name: str, arch: Architecture) -> str | None:
    """What is wrong with parameter `name` in an adapter's files, whose tensors have no prefix; None where all is right."""
    stored = stored_tensor(name, arch).name
    if stored not in files:
        return f"it has no {stored}"
    expected = stored_shapes(arch)[stored]
    if files[stored].shape != expected:
        return f"{stored} is {tuple(files[stored].shape)} there and {expected} in this model"
    if arch.tied and name == EMBEDDING and (HEAD not in files or not torch.equal(files[HEAD], files[stored])):
        return f"{stored} and {HEAD} are one tensor in this model, and two in the files"
    return None
