"""Our canonical names to Hugging Face's stored tensors, and back. No torch.

For all families but GPT-2 the names are the same. GPT-2 stores its projections transposed (transformers' Conv1D keeps [in,
out]) and query, key and value fused in one tensor; both are undone at load and redone at save. Files written by others
may leave out the base model's prefix (`h.0.ln_1.weight`), and carry constants that are no parameters (causal masks,
rotary frequencies, a copy of a tied head).
"""

import math
import re
from dataclasses import dataclass
from typing import Final

from windlass.model.architecture import Architecture, parameter_shapes

VOCABULARY: Final = ("model.embed_tokens.weight", "lm_head.weight")  # the two whose rows are padded in memory
CONSTANTS: Final = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)")
BASE_PREFIX: Final = {"gpt2": "transformer."}
_GPT2: Final = {
    "model.embed_tokens": "transformer.wte",
    "model.embed_positions": "transformer.wpe",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.q_proj": "attn.c_attn",
    "self_attn.k_proj": "attn.c_attn",
    "self_attn.v_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_FUSED: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True)
class Stored:
    """Where a parameter lies: part `part` of `parts` (along its rows) of tensor `name`, perhaps transposed."""

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1


def stored_as(name: str, arch: Architecture) -> Stored:
    """The tensor of the family's Hugging Face file that holds parameter `name`."""
    if arch.family != "gpt2" or name == "lm_head.weight":
        return Stored(name)
    module, kind = name.rsplit(".", 1)
    if module in _GPT2:
        return Stored(f"{_GPT2[module]}.{kind}")
    _, _, layer, inner = module.split(".", 3)
    linear = inner.endswith("_proj")
    fused = inner in _FUSED
    return Stored(
        f"transformer.h.{layer}.{_GPT2[inner]}.{kind}",
        transposed=linear and kind == "weight",
        part=_FUSED.index(inner) if fused else 0,
        parts=len(_FUSED) if fused else 1,
    )


def stored_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of the family's Hugging Face file -> its shape, in the order of the model."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, *rest) in parameter_shapes(arch).items():
        stored = stored_as(name, arch)
        shape = (rows * stored.parts, *rest)
        shapes[stored.name] = shape[::-1] if stored.transposed else shape
    return shapes


def stored_bytes(shape: tuple[int, ...], item_bytes: int) -> int:
    return math.prod(shape) * item_bytes


def expected_name(key: str, arch: Architecture, known: dict[str, tuple[int, ...]]) -> str | None:
    """The tensor that a file's `key` stands for; None for what is no parameter; `key` itself if nothing is known."""
    prefixed = BASE_PREFIX.get(arch.family, "model.") + key
    if key in known:
        return key
    if prefixed in known:
        return prefixed
    if CONSTANTS.fullmatch(key) or (arch.tied and key == "lm_head.weight"):
        return None
    return key
