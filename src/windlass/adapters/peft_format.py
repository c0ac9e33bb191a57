"""An adapter's files as PEFT writes and reads them: adapter_config.json and adapter_model.safetensors.

Factors have PEFT's names by construction, behind its prefix `base_model.model.`. Where a family's file joins matrices that are
apart here (GPT-2's query, key and value in c_attn), PEFT has one pair of factors for all of them:

    out   the pairs (A_i, B_i) of n joined matrices become one pair of rank n r: A_i below each other, B_i along a diagonal of
          blocks. The product is the same, to the bit; alpha is n times as large, so that alpha / rank is what it was
    in    such a pair is taken apart again. Any other pair (A, B) gives each matrix all of A and its own rows of B: the same
          product. Trained on, the copies of A part ways
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from windlass.adapters.config import AdapterConfig
from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.lora.adapter import A, Adapter, B, adapted_shapes, is_factor
from windlass.model.names import stored_as
from windlass.model.slices import local_part, owned_ranges

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
REFUSED: Final = {
    "use_dora": "DoRA scales each row of W + s B A by a trained magnitude",
    "layers_to_transform": "factors of some layers only are not supported",
    "trainable_token_indices": "single rows of the embedding cannot be trained",
    "modules_to_save": "such modules are trained whole here by adapter.also_train, and are not read from an adapter",
    "lora_bias": "factors have no bias here",
}


def is_adapter(directory: Path) -> bool:
    return (directory / CONFIG).is_file()


def completed(config: AdapterConfig) -> AdapterConfig:
    """With rank, alpha, targets and the kind of scale of `adapter.from`, where the recipe does not give them. Raises UserError
    for an adapter that cannot be one, and for a rank or scale that contradicts it."""
    if config.from_ is None:
        return config
    given = read_config(Path(config.from_))
    found = {
        "rank": given["r"],
        "alpha": given["lora_alpha"],
        "rank_stabilized": bool(given.get("use_rslora")),
        "targets": given["target_modules"],
    }
    both = {name: value for name, value in found.items() if name in config.model_fields_set}
    wrong = [name for name, value in both.items() if name != "targets" and value != getattr(config, name)]
    if wrong:
        raise UserError(
            " and ".join(f"adapter.{name}={getattr(config, name)}" for name in wrong)
            + f" with adapter.from={config.from_}",
            "the factors there have " + " and ".join(f"{name} {both[name]}" for name in wrong),
            f"remove {' and '.join(f'adapter.{name}' for name in wrong)} from the recipe",
        )
    return config.changed(**{name: value for name, value in found.items() if name not in both})


def read_config(directory: Path) -> dict[str, Any]:
    """adapter_config.json of a LoRA adapter. Raises UserError."""
    path = directory / CONFIG
    try:
        given: Any = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"adapter.from={directory}: {error}",
            f"an adapter is a directory of PEFT's with {CONFIG} and {WEIGHTS}",
            "give such a directory, or remove adapter.from to begin with new factors",
        ) from None
    if not isinstance(given, dict) or given.get("peft_type") != "LORA":
        kind = given.get("peft_type") if isinstance(given, dict) else type(given).__name__
        raise UserError(
            f"{path} is of kind {kind}", "LoRA adapters can be read", "give a LoRA adapter, or remove adapter.from"
        )
    for name, why in REFUSED.items():
        if given.get(name):
            raise UserError(
                f"{path} has {name}: {given[name]}", why, "give an adapter without it, or remove adapter.from"
            )
    rank, alpha, targets = given.get("r"), given.get("lora_alpha"), given.get("target_modules")
    if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float) and isinstance(targets, list)):
        raise UserError(
            f"{path} has r={rank!r}, lora_alpha={alpha!r} and target_modules={targets!r}",
            "rank and alpha are numbers, targets a list of names",
            "save the adapter again with PEFT's save_pretrained",
        )
    return given


def load_factors(directory: Path, arch: Architecture, tensors: Mapping[str, Tensor]) -> None:
    """Fills this rank's part of each factor. `tensors`: by our names, plain or DTensor. Raises UserError where a factor is
    missing, another is left over, or one has another shape."""
    held = _read(directory)
    for name, tensor in tensors.items():
        module, factor, _ = name.rsplit(".", 2)
        value = _apart(held, module, factor, arch, _rank(factor, tuple(tensor.shape)), directory)
        if value.shape != tensor.shape:
            raise _unfitting(directory, f"{name} is {tuple(value.shape)} there and {tuple(tensor.shape)} in this model")
        index = tuple(slice(part.start, part.stop) for part in owned_ranges(tensor))
        with torch.no_grad():
            local_part(tensor).copy_(value[index])


def check_factors(directory: Path, arch: Architecture, adapter: Adapter) -> None:
    """Raises UserError unless the files hold exactly the factors of `adapter`."""
    held = _read(directory)
    shapes = {name: shape for name, shape in adapted_shapes(arch, adapter).items() if is_factor(name)}
    expected = set()
    for name, shape in shapes.items():
        module, factor, kind = name.rsplit(".", 2)
        expected.add(_key(module, f"{factor}.{kind}", arch))
        value = _apart(held, module, factor, arch, _rank(factor, shape), directory)
        if value.shape != shape:
            raise _unfitting(directory, f"{name} is {tuple(value.shape)} there and {shape} in this model")
    left = sorted(held.keys() - expected)
    if left:
        raise _unfitting(directory, f"it has {left[0]}, for which this recipe has no factors")


def _rank(factor: str, shape: tuple[int, ...]) -> int:
    return shape[0] if factor == "lora_A" else shape[1]


def _apart(
    held: Mapping[str, Tensor], module: str, factor: str, arch: Architecture, rank: int, directory: Path
) -> Tensor:
    """One factor of one matrix, of `rank`, out of the pair that its file has for it."""
    keys = [_key(module, kind, arch) for kind in (A, B)]
    for key in keys:
        if key not in held:
            raise _unfitting(directory, f"it has no {key}")
    a, b = (held[key] for key in keys)
    where = stored_as(f"{module}.weight", arch)
    if where.parts == 1:
        return a if factor == "lora_A" else b
    rows = b.shape[0] // where.parts
    own = slice(where.part * rows, (where.part + 1) * rows)
    if a.shape[0] == rank * where.parts and _is_diagonal(b, where.parts):
        ranks = slice(where.part * rank, (where.part + 1) * rank)
        return a[ranks] if factor == "lora_A" else b[own, ranks]
    return a if factor == "lora_A" else b[own]


def _is_diagonal(b: Tensor, parts: int) -> bool:
    """Whether the blocks off the diagonal are 0."""
    blocks = [block.chunk(parts, 1)[number] for number, block in enumerate(b.chunk(parts))]
    return torch.equal(torch.block_diag(*blocks), b)


def _unfitting(directory: Path, what: str) -> UserError:
    return UserError(
        f"{directory / WEIGHTS}: {what}",
        "an adapter has factors for exactly the matrices that adapter.targets names in this model, of the recipe's rank",
        "check adapter.targets and adapter.rank against its adapter_config.json, and that it was made for this model",
    )


def save_adapter(
    directory: Path,
    config: AdapterConfig,
    arch: Architecture,
    adapter: Adapter,
    tensors: Iterable[tuple[str, Tensor]],
    base: str,
) -> None:
    """Writes both files, in fp32, for PEFT to load beside `base`. `tensors`: by our names, whole: factors, and what is trained
    whole."""
    directory.mkdir(parents=True, exist_ok=True)
    pairs: dict[str, dict[str, Tensor]] = {}
    others: dict[str, Tensor] = {}
    for name, tensor in tensors:
        value = tensor.detach().to("cpu", torch.float32).contiguous()
        if is_factor(name):
            module, factor, _ = name.rsplit(".", 2)
            pairs.setdefault(module, {})[factor] = value
        else:
            others[f"{PREFIX}{stored_as(name, arch).name}"] = value
    joined: dict[str, list[str]] = defaultdict(list)
    for module in pairs:
        joined[_key(module, "", arch)].append(module)
    files = dict(others)
    ranks: dict[str, int] = {}
    for prefix, modules in joined.items():
        parts = stored_as(f"{modules[0]}.weight", arch).parts
        assert len(modules) == parts, (prefix, modules)
        files[f"{prefix}{A}"] = torch.cat([pairs[module]["lora_A"] for module in modules])
        files[f"{prefix}{B}"] = torch.block_diag(*(pairs[module]["lora_B"] for module in modules))
        if parts > 1:
            ranks[prefix.removeprefix(PREFIX).removesuffix(".").rpartition(".")[2]] = parts
    save_file(files, directory / WEIGHTS, metadata={"format": "pt"})
    given = _config(config, arch, adapter, base, ranks, sorted({name.rsplit(".", 2)[-2] for name in others}))
    (directory / CONFIG).write_text(json.dumps(given, indent=2) + "\n", "utf-8")


def _config(
    config: AdapterConfig, arch: Architecture, adapter: Adapter, base: str, joined: Mapping[str, int], whole: list[str]
) -> dict[str, Any]:
    """adapter_config.json. `joined`: how many matrices a module joins, where it is more than one; `whole`: modules that are
    trained whole."""
    names = [stored_as(f"{module}.weight", arch).name.removesuffix(".weight") for module in adapter.targets]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "use_rslora": config.rank_stabilized,
        "target_modules": sorted(dict.fromkeys(name.rpartition(".")[2] for name in names)),
        "modules_to_save": whole or None,
        "rank_pattern": {name: config.rank * parts for name, parts in joined.items()},
        "alpha_pattern": {name: config.scale * _divisor(config, config.rank * parts) for name, parts in joined.items()},
        "fan_in_fan_out": arch.family == "gpt2",
        "bias": "none",
        "use_dora": False,
        "inference_mode": True,
    }


def _divisor(config: AdapterConfig, rank: int) -> float:
    return rank**0.5 if config.rank_stabilized else rank


def _key(module: str, kind: str, arch: Architecture) -> str:
    return f"{PREFIX}{stored_as(f'{module}.weight', arch).name.removesuffix('weight')}{kind}"


def _read(directory: Path) -> dict[str, Tensor]:
    try:
        return load_file(directory / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{directory / WEIGHTS}: {error}",
            "an adapter's factors are one safetensors file",
            "copy or save the adapter again",
        ) from None
