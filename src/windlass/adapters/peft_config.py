"""adapter_config.json of a PEFT adapter: which adapters can be read, and what of a recipe they decide."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from windlass.adapters.config import AdapterConfig
from windlass.adapters.modules_to_save import patterns_of
from windlass.errors import UserError

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
REFUSED: Final = {
    "use_dora": "DoRA scales each row of W + s B A by a trained magnitude",
    "layers_to_transform": "factors of some layers only are not supported",
    "trainable_token_indices": "single rows of the embedding cannot be trained",
    "lora_bias": "factors have no bias here",
    "target_parameters": "factors are beside matrices of modules here",
    "layer_replication": "each layer is in the model once",
    **dict.fromkeys(
        ("alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config"),
        "LoRA adds s B A to its matrix, at every token, and nothing else",
    ),
}
CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of init_lora_weights whose factors are beside a base that PEFT has changed: the base's own files are not it."""


def completed(config: AdapterConfig) -> AdapterConfig:
    """With rank, alpha, kind of scale, targets and also_train of `adapter.from`, where the recipe does not give them. Raises
    UserError for an adapter that cannot be one, and for a rank or scale that contradicts it."""
    if config.from_ is None:
        return config
    given = read_config(Path(config.from_))
    found = {
        "rank": given["r"],
        "alpha": given["lora_alpha"],
        "rank_stabilized": bool(given.get("use_rslora")),
        "targets": given["target_modules"],
        "also_train": patterns_of(given.get("modules_to_save") or ()),
    }
    both = {name: value for name, value in found.items() if name in config.model_fields_set}
    wrong = [
        name for name, value in both.items() if name not in ("targets", "also_train") and value != getattr(config, name)
    ]
    if wrong:
        raise UserError(
            " and ".join(f"adapter.{name}={getattr(config, name)}" for name in wrong)
            + f" with adapter.from={config.from_}",
            "the factors there have " + " and ".join(f"{name} {both[name]}" for name in wrong),
            f"remove {' and '.join(f'adapter.{name}' for name in wrong)} from the recipe",
        )
    return config.changed(**{name: value for name, value in found.items() if name not in both})


def base_named(directory: Path) -> str | None:
    """The base that an adapter was made beside; None where its files are gone, as a resumed run allows. Raises UserError."""
    return read_config(directory).get("base_model_name_or_path") if (directory / CONFIG).is_file() else None


def read_config(directory: Path) -> dict[str, Any]:
    """adapter_config.json of a LoRA adapter. Raises UserError."""
    path = directory / CONFIG
    try:
        given: Any = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        is_run = (directory / "checkpoints").is_dir()
        raise UserError(
            f"adapter.from={directory}: " + ("it is a run" if is_run else str(error)),
            f"an adapter is a directory of PEFT's with {CONFIG} and {WEIGHTS}",
            f"use run.start_from={directory}, or export it and give {directory / 'export'}"
            if is_run
            else "give such a directory, or remove adapter.from to begin with new factors",
        ) from None
    if not isinstance(given, dict) or given.get("peft_type") != "LORA":
        kind = given.get("peft_type") if isinstance(given, dict) else type(given).__name__
        raise UserError(
            f"{path} is of kind {kind}", "LoRA adapters can be read", "give a LoRA adapter, or remove adapter.from"
        )
    found = [(name, why) for name, why in REFUSED.items() if given.get(name)]
    if given.get("bias") not in (None, "none"):
        found.append(("bias", "biases are not trained beside factors here"))
    if str(given.get("init_lora_weights")).startswith(CHANGES_BASE):
        found.append(
            ("init_lora_weights", "its factors belong to a base that this has changed, not to the base's files")
        )
    if not _has_one_scale(given):
        found.append(("alpha_pattern", "all factors have one scale here"))
    for name, why in found:
        raise UserError(
            f"{path} has {name}: {given.get(name)}", why, "give an adapter without it, or remove adapter.from"
        )
    if isinstance(given.get("target_modules"), str):
        listed = json.dumps(_targets_in(directory / WEIGHTS) or ["q_proj", "v_proj"])
        raise UserError(
            f"{path} has target_modules: {given['target_modules']}",
            "targets are a list of the last parts of names; regular expressions are not supported",
            f'write the list of its factors there, which PEFT reads too: "target_modules": {listed}',
        )
    rank, alpha, targets = given.get("r"), given.get("lora_alpha"), given.get("target_modules")
    if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float) and isinstance(targets, list)):
        raise UserError(
            f"{path} has r={rank!r}, lora_alpha={alpha!r} and target_modules={targets!r}",
            "rank and alpha are numbers, targets a list of names",
            "save the adapter again with PEFT's save_pretrained",
        )
    return given


def _targets_in(weights: Path) -> list[str]:
    """The last parts of the modules that the file has factors of; empty where it cannot be read."""
    try:
        with safe_open(weights, framework="np") as file:
            return sorted({key.split(".lora_")[0].rpartition(".")[2] for key in file.keys() if ".lora_" in key})  # noqa: SIM118
    except (SafetensorError, OSError):
        return []


def _has_one_scale(given: Mapping[str, Any]) -> bool:
    """Whether all modules have the same scale, whatever their ranks (a fused matrix has the ranks of its parts together)."""
    ranks, alphas = given.get("rank_pattern") or {}, given.get("alpha_pattern") or {}
    power = 0.5 if given.get("use_rslora") else 1.0
    try:
        scales = {
            round(alphas.get(name, given["lora_alpha"]) / ranks.get(name, given["r"]) ** power, 9)
            for name in {"", *ranks, *alphas}
        }
    except (TypeError, KeyError, ZeroDivisionError):
        return True  # read_config refuses them
    return len(scales) == 1
