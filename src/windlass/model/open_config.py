"""config.json of a Hugging Face directory, read; and the sizes that it states, compared with the stored weights. No torch.

A config.json may state any size, and a model of 10^7 layers or 10^12 rows would ask the host for its memory. Where the weights
are at hand, no size is used before it is compared with what the files hold.
"""

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

from windlass.errors import UserError, nearest_entry
from windlass.hub.client import locate
from windlass.model.architecture import Architecture
from windlass.model.config import ModelConfig, architecture_from_hf
from windlass.model.flops import count_parameters
from windlass.units import MIB, format_bytes

MAX_BYTES: Final = 16 * MIB  # a bound, not a target: published ones have a few KiB
MAX_LEVELS: Final = 16  # likewise: published ones have three
LAYERS: Final = ("num_hidden_layers", "n_layer")
SIZES: Final = (
    *("vocab_size", "hidden_size", "n_embd", "num_attention_heads", "n_head", "num_key_value_heads", "head_dim"),
    *("num_experts", "num_local_experts", "moe_intermediate_size"),
)
"""Fields that are a size of a stored tensor, or divide one."""


class StoredSizes(NamedTuple):
    """What the weights of a model hold, by their index or headers."""

    num_tensors: int
    num_elements: int


def model_directory(config: ModelConfig) -> Path:
    """Where config.json and weights of `from` are: the directory, or the hub's cache. Raises UserError."""
    assert config.from_ is not None
    return locate(config.from_, config.commit or config.revision, "model.from", config.hub_cache)


def architecture_of(config: ModelConfig, vocab_size: int | None = None) -> Architecture:
    """The model of a recipe, with the config.json of `from` where it has one. Raises UserError."""
    return config.architecture(vocab_size, None if config.from_ is None else read_hf_config(model_directory(config)))


def read_hf_config(directory: str | Path) -> dict[str, Any]:
    """config.json of a local Hugging Face directory, parsed. Raises UserError if there is none or it is damaged."""
    path = Path(directory)
    if not path.is_dir():
        raise UserError(
            f"model.from: {directory}",
            "this is neither a directory nor a name of the hub, which has the form org/name",
            f"{nearest_entry(path)}give a Hugging Face directory, or a name such as Qwen/Qwen3-4B",
        )
    file = path / "config.json"
    if not file.is_file():
        raise UserError(
            f"model.from: {directory} has no config.json",
            "a Hugging Face directory holds config.json beside its safetensors files",
            f"it is a run: `windlass export {directory}`, then model.from: {path / 'export'}"
            if (path / "checkpoints").is_dir()
            else "give the directory that holds config.json",
        )
    if (size := file.stat().st_size) > MAX_BYTES:
        raise UserError(
            f"{file} has {format_bytes(size)}",
            f"a config.json has at most {format_bytes(MAX_BYTES)}",
            "copy or download the file again",
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise _too_deep(file) from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, and numbers of thousands of digits
        raise UserError(f"{file}: {error}", "config.json is valid JSON", "copy or download the file again") from error
    if not isinstance(config, dict):
        raise UserError(f"{file}: a {type(config).__name__}", "config.json holds one object", "copy the file again")
    _check_depth(config, file)
    return config


def fewer_rows(directory: Path, vocab_size: int) -> int | None:
    """The rows of the directory's vocabulary, by its config.json, where they are fewer than `vocab_size`; else None."""
    rows = read_hf_config(directory).get("vocab_size")
    return rows if isinstance(rows, int) and 0 < rows < vocab_size else None


def _check_depth(config: dict[str, Any], where: Path) -> None:
    level: list[Any] = [config]
    for _ in range(MAX_LEVELS):
        inside = [one.values() if isinstance(one, dict) else one for one in level]
        level = [one for values in inside for one in values if isinstance(one, dict | list)]
    if level:
        raise _too_deep(where)


def _too_deep(where: Path) -> UserError:
    return UserError(
        f"{where}: the model's config is nested too deeply",
        f"a config.json has at most {MAX_LEVELS} levels",
        "copy or download it again",
    )


def architecture_within(fields: dict[str, Any], held: StoredSizes, where: Path) -> Architecture:
    """architecture_from_hf(`fields`) for weights that hold `held`. Raises UserError where it is larger than they are."""
    _check_depth(fields, where)
    for name, most in [*((name, held.num_tensors) for name in LAYERS), *((name, held.num_elements) for name in SIZES)]:
        value = fields.get(name)
        if isinstance(value, int) and value > most:
            raise _too_large(f"{name} {value}", held, where)
    architecture = architecture_from_hf(fields)
    if (needed := count_parameters(architecture)) > held.num_elements:
        raise _too_large(f"a model of {needed} parameters", held, where)
    return architecture


def _too_large(stated: str, held: StoredSizes, where: Path) -> UserError:
    return UserError(
        f"{where} states {stated}, and its weights are {held.num_tensors} tensors of {held.num_elements} elements in all",
        "a model is as large as its weights",
        "check that the config and the weights belong together, or copy the directory again",
    )
