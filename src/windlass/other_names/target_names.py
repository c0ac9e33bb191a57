"""The matrices that other tools' `target_modules` means, as `adapter.targets` lists them. PEFT takes a text there for a regular
expression over whole names, which is not supported here. No torch.
"""

import re
import warnings
from collections.abc import Sequence
from typing import Any, Final

_BLOCK: Final = (
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj"
)
_LLAMA: Final = [f"model.layers.{layer}.{name}" for layer in (0, 1, 12) for name in _BLOCK.split()]


def target_list(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else [part.strip() for part in str(value).split(",")]


def listed_targets(value: Any) -> str:
    """`adapter.targets=...` for another tool's targets, or for one text in place of a list."""
    found = target_list(value)
    if found in (["all-linear"], ["all_linear"], ["all"]):
        return "adapter.targets=all-linear"
    if all(re.fullmatch(r"[\w.]+", one) for one in found):
        return f"adapter.targets=[{', '.join(found)}]"
    names = named_by(str(value), _LLAMA)
    what = "what the expression finds in a Llama" if names else "for example"
    return (
        f"adapter.targets=[{', '.join(names or ['q_proj', 'v_proj'])}] ({what}; regular expressions are not supported)"
    )


def named_by(expression: str, modules: Sequence[str]) -> list[str]:
    """The last parts of the `modules` that PEFT finds by `expression`. Empty where it is no regular expression, finds nothing, or
    finds a part in some layers only, which a list of last parts cannot say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `[[` may mean something else in a later Python
        try:
            found = [name for name in modules if re.fullmatch(expression, name)]
        except re.error:
            return []
    parts = dict.fromkeys(name.rpartition(".")[2] for name in found)
    return list(parts) if len(found) == sum(name.rpartition(".")[2] in parts for name in modules) else []
