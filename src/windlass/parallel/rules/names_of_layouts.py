"""What other tools call our settings. A recipe that uses one of those names is answered with ours, and not with "unknown key".

    FSDP1, accelerate     what it cuts                                   here
    FULL_SHARD            parameters, gradients, states (ZeRO-3)         zero: 3, shard: -1
    SHARD_GRAD_OP         gradients, states (ZeRO-2)                     zero: 2, shard: -1
    HYBRID_SHARD          ZeRO-3 inside a node, copies across (HSDP)     zero: 3, replicate: -1, shard: ranks of a node
    _HYBRID_SHARD_ZERO2   ZeRO-2 inside a node, copies across            zero: 2, replicate: -1, shard: ranks of a node
    NO_SHARD              nothing (DDP)                                  zero: 0

Nothing is translated silently: two names for one setting would be two places to look. No torch here.

Sources: torch.distributed.fsdp.ShardingStrategy (names and numbers), accelerate's FSDP plugin, DeepSpeed's zero_optimization.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from windlass.errors import UserError
from windlass.precision.names_of_policies import policy_of, refuse_other_precisions

STRATEGIES: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
"""In the order of torch's enumeration: FULL_SHARD is 1."""

OURS: Final = {
    "FULL_SHARD": "parallel.zero=3 parallel.shard=-1",
    "SHARD_GRAD_OP": "parallel.zero=2 parallel.shard=-1",
    "HYBRID_SHARD": "parallel.zero=3 parallel.replicate=-1 parallel.shard=8 (the ranks of a node, here 8)",
    "_HYBRID_SHARD_ZERO2": "parallel.zero=2 parallel.replicate=-1 parallel.shard=8 (the ranks of a node, here 8)",
    "NO_SHARD": "parallel.zero=0",
}
ALIASES: Final = {
    "HYBRID_SHARD_ZERO2": "_HYBRID_SHARD_ZERO2",
    "HSDP": "HYBRID_SHARD",
    "FSDP": "FULL_SHARD",
    "FSDP2": "FULL_SHARD",
    "DDP": "NO_SHARD",
}

CHOOSES: Final = ("strategy", "sharding_strategy", "fsdp_sharding_strategy", "zero_stage", "stage", "zero_optimization")
"""Keys whose value names a sharding."""
SWITCHES: Final = {
    "reshard_after_forward": ("parallel.zero=3", "parallel.zero=2"),
    "fsdp_reshard_after_forward": ("parallel.zero=3", "parallel.zero=2"),
    "cpu_offload": ("parallel.offload=true", "parallel.offload=false"),
    "fsdp_cpu_offload": ("parallel.offload=true", "parallel.offload=false"),
    "fsdp_offload_params": ("parallel.offload=true", "parallel.offload=false"),
    "gradient_checkpointing": ("parallel.recompute=full", "parallel.recompute=none"),
    "activation_checkpointing": ("parallel.recompute=full", "parallel.recompute=none"),
    "fsdp_activation_checkpointing": ("parallel.recompute=full", "parallel.recompute=none"),
    "forward_prefetch": ("parallel.prefetch=1", "parallel.prefetch=0"),
    "fsdp_forward_prefetch": ("parallel.prefetch=1", "parallel.prefetch=0"),
}
"""Key -> our setting for true and for false."""
ALWAYS: Final = {
    "use_orig_params": "nothing (FSDP2 keeps every parameter by its own name)",
    "fsdp_use_orig_params": "nothing (FSDP2 keeps every parameter by its own name)",
    "sync_module_states": "nothing (every rank fills its own shard)",
    "fsdp_sync_module_states": "nothing (every rank fills its own shard)",
    "limit_all_gathers": "nothing (FSDP2 needs no such limit)",
    "backward_prefetch": "nothing, or parallel.prefetch for more than one unit ahead (one is FSDP2's own order in backward)",
    "fsdp_backward_prefetch": "nothing, or parallel.prefetch for more than one unit ahead (one is FSDP2's own order in backward)",
    "min_num_params": "nothing, or parallel.blocks_per_unit (a unit is a block)",
    "auto_wrap_policy": "nothing, or parallel.blocks_per_unit (a unit is a block)",
    "fsdp_auto_wrap_policy": "nothing, or parallel.blocks_per_unit (a unit is a block)",
    "fsdp_transformer_layer_cls_to_wrap": "nothing, or parallel.blocks_per_unit (a unit is a block)",
    "find_unused_parameters": "nothing (a parameter without a gradient stops the run)",
}
"""Key -> what to write instead, whatever its value."""


def refuse_other_names(given: Mapping[str, Any], where: str = "parallel") -> None:
    """Raises UserError for keys of `given` that are other tools' names, and for other tools' values of `zero`."""
    found = {f"{where}.{key}": (value, ours) for key, value in given.items() if (ours := _setting(key, value))}
    zero = given.get("zero")
    if isinstance(zero, str) and (ours := _sharding(zero)):
        found[f"{where}.zero"] = (zero, ours)
    if found:
        raise UserError(
            "; ".join(f"{key}={as_yaml(value)}" for key, (value, _) in found.items()),
            "that is another tool's name; here zero says what is cut, shard and replicate over how many ranks",
            "use " + "; ".join(dict.fromkeys(ours for _, ours in found.values())),
        )


def refuse_other_sections(given: Mapping[str, Any]) -> None:
    """The same for whole sections that other tools have: `fsdp: {sharding_strategy: FULL_SHARD, ...}`; and for precisions."""
    for section in ("fsdp", "fsdp_config", "ddp"):
        content = given.get(section)
        if isinstance(content, Mapping):
            refuse_other_names(content, section)
        if isinstance(content, str) and (ours := _sharding(content)):
            raise UserError(f"{section}={content}", "the layout is the section `parallel`", f"use {ours}")
        if section in given:
            raise UserError(
                f"a section `{section}`", "the layout is the section `parallel`", "see parallel in docs/recipe.md"
            )
    refuse_other_precisions(given)


def _setting(key: str, value: Any) -> str | None:
    """Our setting for another tool's key; None for keys that are nobody's."""
    if key in SWITCHES and isinstance(value, bool):
        return SWITCHES[key][0 if value else 1]
    if key in ("bucket_cap_mb", "ddp_bucket_cap_mb"):
        return f"parallel.zero=0 parallel.bucket_mib={value}"
    if key in ("fsdp", "ddp"):
        return _sharding(str(value)) or OURS["FULL_SHARD" if key == "fsdp" else "NO_SHARD"]
    if key == "mixed_precision":
        return policy_of(value) or "precision.policy=bf16"
    if key in CHOOSES:
        by_number = isinstance(value, int) and key.endswith("strategy") and 1 <= value <= len(STRATEGIES)
        return _sharding(STRATEGIES[value - 1] if by_number else str(value)) or " or ".join(
            OURS[name] for name in STRATEGIES[:3]
        )
    return ALWAYS.get(key)


def _sharding(word: str) -> str | None:
    """Our setting for the name of a sharding in any common spelling: FULL_SHARD, zero-3, stage3, "3"."""
    name = word.rpartition(".")[2].strip().upper().replace("-", "_").replace(" ", "_")
    stage = re.fullmatch(r"(?:ZERO|STAGE|DEEPSPEED_STAGE|ZERO_STAGE)?_*([0-3])", name)
    if stage:
        return f"parallel.zero={stage[1]}"
    return OURS.get(ALIASES.get(name, name))


def as_yaml(value: Any) -> str:
    """A value as a recipe would have it."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f'"{text}"' if isinstance(value, str) and text.isdigit() else text  # a number in quotes is text
