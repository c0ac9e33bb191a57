"""What other tools call a precision. A recipe that says `bf16-mixed` or `fp16: true` is answered with our policy.

    stored, computed      Lightning   accelerate, Trainer   here
    fp32, bf16            bf16-mixed  mixed_precision=bf16  bf16
    fp32, fp16            16-mixed    mixed_precision=fp16  fp16
    fp32, fp32            32-true     mixed_precision=no    fp32
    bf16, bf16            bf16-true                         bf16-pure

fp16 without fp32 weights (16-true) and fp8 are not here; they are answered with the nearest that is, and the difference. No
torch. Sources: Lightning's `Trainer(precision=...)`, transformers' TrainingArguments, accelerate's `mixed_precision`, DeepSpeed's
sections `bf16` and `fp16`, torchtitan's `mixed_precision_param`, LLM Foundry's `amp_bf16`.
"""

from collections.abc import Mapping
from typing import Any, Final

from windlass.errors import UserError
from windlass.precision.config import POLICIES

_SPELLINGS: Final = {
    "bf16": "bf16 bfloat16 bf16-mixed mixed-bf16 bfloat16-mixed mixed-bfloat16 amp-bf16 amp-bfloat16",
    "fp16": "fp16 16 float16 half 16-mixed fp16-mixed mixed-fp16 float16-mixed mixed-float16 amp-fp16 amp-float16 amp",
    "fp32": "fp32 32 float32 float single full no none 32-true fp32-true",
    "fp64": "fp64 64 float64 double 64-true fp64-true",
    "bf16-pure": "bf16-pure bf16-true bfloat16-true pure-bf16 true-bf16",
    "fp32 (whether its products run in TF32 is torch's setting)": "tf32 tensorfloat32",
    "fp16 (weights stay in fp32: fp16 ones lose most updates)": "16-true fp16-true pure-fp16",
    "bf16 (there is no fp8 here)": "fp8 fp8-mixed transformer-engine fp8-e4m3 mixed-fp8 amp-fp8",
}
WORDS: Final = {word: policy for policy, words in _SPELLINGS.items() for word in words.split()}
SWITCHES: Final = {"bf16": "bf16", "fp16": "fp16", "bf16_full_eval": "bf16", "fp16_full_eval": "fp16", "tf32": "tf32"}
"""Keys that turn a precision on."""
_DTYPES: Final = {"param": "parameters", "reduce": "reduce", "output": "output", "buffer": None}


def policy_of(word: Any) -> str | None:
    """`precision.policy=...` for the name of a precision in any common spelling; None for words that are nobody's."""
    name = str(word).rpartition(".")[2].strip().lower().replace("_", "-").replace(" ", "-")
    policy = WORDS.get({"false": "no"}.get(name, name))  # YAML 1.1 reads `no` as false
    return None if policy is None else f"precision.policy={policy}"


def refuse_other_precisions(recipe: Mapping[str, Any]) -> None:
    """Raises UserError where a recipe names a precision as another tool does: at its top, or in the section `precision`."""
    section = recipe.get("precision")
    found = {key: (value, ours) for key, value in recipe.items() if (ours := _setting(key, value))}
    if isinstance(section, Mapping):
        policy = section.get("policy")
        if policy is not None and policy not in POLICIES and (ours := policy_of(policy)):
            found["precision.policy"] = (policy, ours)
        found |= {f"precision.{key}": (value, ours) for key, value in section.items() if (ours := _setting(key, value))}
    elif section is not None and (ours := policy_of(section)):
        found["precision"] = (section, ours)
    if found:
        raise UserError(
            "; ".join(f"{key}={_shown(value)}" for key, (value, _) in found.items()),
            f"that is another tool's name; here precision.policy is one of {', '.join(POLICIES)}",
            "use " + "; ".join(dict.fromkeys(ours for _, ours in found.values())),
        )


def _setting(key: str, value: Any) -> str | None:
    """Our setting for another tool's key; None for keys that are nobody's."""
    if key in SWITCHES:
        is_on = value.get("enabled", True) if isinstance(value, Mapping) else value
        return policy_of(SWITCHES[key]) if is_on else "nothing (precision.policy alone says it)"
    if key == "mixed_precision":
        return policy_of(value) or "precision.policy=bf16"
    if key.startswith("mixed_precision_") and key.removeprefix("mixed_precision_") in _DTYPES:
        ours, policy = _DTYPES[key.removeprefix("mixed_precision_")], policy_of(value)
        return (
            f"precision.{ours}={policy.partition('=')[2]}" if ours and policy else "nothing (buffers stay as they are)"
        )
    return None


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(one)}" for key, one in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
