"""An adapter's files as PEFT writes and reads them: adapter_config.json and adapter_model.safetensors.

Factors have PEFT's names by construction, behind its prefix `base_model.model.`. Where a family's file joins matrices that are
apart here (GPT-2's query, key and value in c_attn, Phi-3's in qkv_proj), PEFT has one pair of factors for all of them:

    out   the pairs (A_i, B_i) of n joined matrices become one pair of rank n r: A_i below each other, B_i along a diagonal of
          blocks. The product is the same, to the bit; alpha is n times as large, so that alpha / rank is what it was
    in    such a pair is taken apart again. Any other pair (A, B) gives each matrix all of A and its own rows of B: the same
          product. Trained on, the copies of A part ways
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from windlass.adapters.config import AdapterConfig
from windlass.adapters.modules_to_save import EMBEDDING, HEAD, fault, module_names, stored_whole
from windlass.adapters.peft_config import CONFIG, WEIGHTS, read_config
from windlass.errors import UserError
from windlass.model.architecture import Architecture, parameter_shapes
from windlass.model.hf import read_into
from windlass.model.lora.adapter import A, Adapter, B, adapted_shapes, is_factor
from windlass.model.names import stored_tensor
from windlass.ranks.owned_part import local_part, owned_ranges

PREFIX: Final = "base_model.model."
BASE_HASHES: Final = "base_hashes"


@torch.no_grad()
def load_adapter(directory: Path, arch: Architecture, tensors: Mapping[str, Tensor]) -> None:
    """Fills this rank's part of each factor, and of what the files hold whole. `tensors`: by our names, plain or DTensor; others
    stay as they are. Raises UserError where a factor is missing, or has another shape."""
    files = _read(directory)
    whole = {key.removeprefix(PREFIX): value for key, value in files.items()}
    for name, tensor in tensors.items():
        if not is_factor(name) and stored_tensor(name, arch).name in whole:
            read_into(local_part(tensor), owned_ranges(tensor), name, arch, whole)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if is_factor(name)}
    for name, value in _factors(files, shapes, arch, directory):
        index = tuple(slice(part.start, part.stop) for part in owned_ranges(tensors[name]))
        local_part(tensors[name]).copy_(value[index])


def base_hashes(directory: Path) -> dict[str, str]:
    """By file, of the base that the adapter was trained beside; none where another tool wrote it. Raises UserError."""
    try:
        with safe_open(directory / WEIGHTS, framework="pt") as opened:
            return dict(json.loads((opened.metadata() or {}).get(BASE_HASHES, "{}")))
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise _unreadable(directory, error) from None


def check_files(directory: Path, arch: Architecture, adapter: Adapter) -> None:
    """Raises UserError unless the files hold exactly the factors of `adapter`, and what it trains whole. Files without
    modules_to_save may hold none of that: it begins as the base has it."""
    shapes = {name: shape for name, shape in adapted_shapes(arch, adapter).items() if is_factor(name)}
    left = _read(directory)
    for name, _ in list(_factors(left, shapes, arch, directory)):
        left.pop(_key(name, arch), None)
    if read_config(directory).get("modules_to_save"):
        whole = {key.removeprefix(PREFIX): value for key, value in left.items()}
        for name in sorted(adapter.also_trained):
            what = fault(whole, name, arch)
            if what:
                raise _unfitting(directory, what)
            left.pop(f"{PREFIX}{stored_tensor(name, arch).name}", None)
        if arch.tied and EMBEDDING in adapter.also_trained:
            del left[f"{PREFIX}{HEAD}"]
    if left:
        raise _unfitting(directory, f"it has {min(left)}, which this recipe does not train")


def save_adapter(
    directory: Path,
    config: AdapterConfig,
    arch: Architecture,
    adapter: Adapter,
    tensors: Mapping[str, Tensor],
    base: str,
    base_hashes: Mapping[str, str] | None = None,
) -> None:
    """Writes both files, in fp32, for PEFT to load beside `base`. `tensors`: by our names, whole: factors, and what is trained
    whole. `base_hashes`: of the base's files, kept where PEFT does not look, in the metadata of the safetensors file."""
    values = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}
    whole = stored_whole({name: value for name, value in values.items() if not is_factor(name)}, arch)
    files = {f"{PREFIX}{name}": value for name, value in whole.items()}
    joined: dict[str, int] = {}
    for modules in _joined(values, arch).values():
        pairs = [(values[f"{module}.{A}"], values[f"{module}.{B}"]) for module in modules]
        files[_key(f"{modules[0]}.{A}", arch)] = torch.cat([a for a, _ in pairs])
        files[_key(f"{modules[0]}.{B}", arch)] = _diagonal([b for _, b in pairs], modules, arch)
        if len(modules) > 1:
            joined[_stored(modules[0], arch).rpartition(".")[2]] = len(modules)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(files, directory / WEIGHTS, metadata={"format": "pt", BASE_HASHES: json.dumps(base_hashes or {})})
    given = _config(config, arch, adapter, base, joined, module_names(whole, arch))
    (directory / CONFIG).write_text(json.dumps(given, indent=2) + "\n", "utf-8")


def _factors(
    held: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], arch: Architecture, directory: Path
) -> Iterator[tuple[str, Tensor]]:
    """Each factor of `shapes`, whole, out of the pair that the files have for its matrix, or for several. Raises UserError."""
    joined = _joined(shapes, arch)
    for name, shape in shapes.items():
        module = name.rsplit(".", 2)[0]
        keys = [_key(f"{module}.{factor}", arch) for factor in (A, B)]
        for key in keys:
            if key not in held:
                raise _unfitting(directory, f"it has no {key}")
        a, b = _apart(
            held[keys[0]], held[keys[1]], module, joined[_stored(module, arch)], arch, shapes[f"{module}.{A}"][0]
        )
        value = a if name.endswith(A) else b
        if value.shape != shape:
            raise _unfitting(directory, f"{name} is {tuple(value.shape)} there and {shape} in this model")
        yield name, value


def _apart(
    a: Tensor, b: Tensor, module: str, joined: Sequence[str], arch: Architecture, rank: int
) -> tuple[Tensor, Tensor]:
    """The pair of one matrix, of `rank`, out of the pair (a, b) of the matrices `joined`."""
    if not stored_tensor(f"{module}.weight", arch).rows:  # a tensor of its own
        return a, b
    if len(a) == rank * len(joined):
        columns = [slice(number * rank, (number + 1) * rank) for number in range(len(joined))]
        parts = [b[_rows(one, arch), own] for one, own in zip(joined, columns, strict=True)]
        if torch.equal(_diagonal(parts, joined, arch), b):
            number = joined.index(module)
            return a[columns[number]], parts[number]
    return a, b[_rows(module, arch)]


def _diagonal(parts: Sequence[Tensor], joined: Sequence[str], arch: Architecture) -> Tensor:
    """B of the tensor that holds the matrices `joined`: each has its own rows and columns, and 0 elsewhere."""
    rows = stored_tensor(f"{joined[0]}.weight", arch).rows
    if not rows:
        return parts[0]
    rank = parts[0].shape[1]
    whole = parts[0].new_zeros(rows, rank * len(joined))
    for number, (part, module) in enumerate(zip(parts, joined, strict=True)):
        whole[_rows(module, arch), number * rank : (number + 1) * rank] = part
    return whole


def _rows(module: str, arch: Architecture) -> slice:
    """The rows that the module's matrix takes in the tensor that holds it."""
    first = stored_tensor(f"{module}.weight", arch).first
    return slice(first, first + parameter_shapes(arch)[f"{module}.weight"][0])


def _joined(names: Iterable[str], arch: Architecture) -> dict[str, list[str]]:
    """The files' modules -> the matrices with factors among `names` that each joins, in its order."""
    modules = [name.removesuffix(f".{A}") for name in names if name.endswith(A)]
    found: dict[str, list[str]] = {}
    for module in sorted(modules, key=lambda one: stored_tensor(f"{one}.weight", arch).first):
        found.setdefault(_stored(module, arch), []).append(module)
    return found


def _stored(module: str, arch: Architecture) -> str:
    return stored_tensor(f"{module}.weight", arch).name.removesuffix(".weight")


def _key(name: str, arch: Architecture) -> str:
    """What the files call a factor."""
    module, factor, kind = name.rsplit(".", 2)
    return f"{PREFIX}{_stored(module, arch)}.{factor}.{kind}"


def _unfitting(directory: Path, what: str) -> UserError:
    return UserError(
        f"{directory / WEIGHTS}: {what}",
        "an adapter has factors for exactly the matrices that adapter.targets names in this model, of the recipe's rank; of "
        "modules_to_save it has exactly the parameters that adapter.also_train names",
        "check adapter.targets, rank and also_train against its adapter_config.json, and that it was made for this model",
    )


def _config(
    config: AdapterConfig, arch: Architecture, adapter: Adapter, base: str, joined: Mapping[str, int], whole: list[str]
) -> dict[str, Any]:
    """adapter_config.json. `joined`: how many matrices a module joins, where it is more than one; `whole`: modules that are
    trained whole."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rank_stabilized,
        "target_modules": _target_modules(arch, adapter),
        "modules_to_save": whole or None,
        "ensure_weight_tying": arch.tied and EMBEDDING in adapter.also_trained,
        "rank_pattern": {name: config.rank * parts for name, parts in joined.items()},
        "alpha_pattern": {name: config.scale * _divisor(config, config.rank * parts) for name, parts in joined.items()},
        "fan_in_fan_out": arch.family == "gpt2",
        "bias": "none",
        "use_dora": False,
        "inference_mode": True,
    }


def _target_modules(arch: Architecture, adapter: Adapter) -> list[str]:
    """The last parts of names, and whole names where a part carries factors in some layers only: PEFT would add the others."""
    names = {_stored(module, arch) for module in adapter.targets}
    every = {stored_tensor(name, arch).name.removesuffix(".weight") for name in parameter_shapes(arch)}
    partly = {name.rpartition(".")[2] for name in every - names}
    return sorted({name if (last := name.rpartition(".")[2]) in partly else last for name in names})


def _divisor(config: AdapterConfig, rank: int) -> float:
    return rank**0.5 if config.rank_stabilized else rank


def _read(directory: Path) -> dict[str, Tensor]:
    try:
        return load_file(directory / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise _unreadable(directory, error) from None


def _unreadable(directory: Path, error: Exception) -> UserError:
    return UserError(
        f"{directory / WEIGHTS}: {error}",
        "an adapter's factors are one safetensors file",
        "copy or save the adapter again",
    )
