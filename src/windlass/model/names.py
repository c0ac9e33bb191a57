"""Our canonical names to Hugging Face's stored tensors, and back. No torch.

For most families the names are the same, but for what a family's class says in `stored_names` and `fused`. Mixtures of experts
are stored as one tensor per expert and matrix, and are one parameter per matrix here: `mlp.experts.up_proj.weight` [E, F, D]
for `mlp.experts.0.up_proj.weight` [F, D] and so on. A user calls all of them `mlp.experts.*.up_proj.weight`: one rate, decay or
freeze holds for all experts of a layer. GPT-2 stores its projections transposed (transformers' Conv1D keeps [in, out]) and
query, key and value fused in one tensor, as phi3 does; both are undone at load and redone at save. Files written by others may
leave out the base model's prefix (`h.0.ln_1.weight`), and carry constants that are no parameters (causal masks, rotary
frequencies).
"""

import math
import re
from dataclasses import dataclass
from typing import Final

from windlass.model.architecture import Architecture, parameter_shapes
from windlass.model.families.family_table import FAMILIES

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
    """Where a parameter is stored: in tensor `name`, perhaps transposed. Where several share it, it has `rows` rows, and this
    one's begin with `first`. With `experts`: each index of its first dim is a tensor of its own, whose number replaces the `*` in
    `name`."""

    name: str
    transposed: bool = False
    first: int = 0
    rows: int = 0
    experts: int = 0

    def of_expert(self, expert: int) -> str:
        return self.name.replace("*", str(expert))

    @property
    def names(self) -> list[str]:
        """The tensors of the file that hold the parameter."""
        return [self.of_expert(expert) for expert in range(self.experts)] or [self.name]


def stored_tensor(name: str, arch: Architecture) -> Stored:
    """The tensor of the family's Hugging Face file that holds parameter `name`."""
    module, kind = name.rsplit(".", 1)
    if arch.family == "gpt2" and name != "lm_head.weight":
        return _stored_by_gpt2(module, kind, arch)
    family, (before, dot, rest) = FAMILIES[arch.family], module.partition(".layers.")
    if not dot:
        return Stored(name)
    layer, inner = rest.split(".", 1)
    first = rows = 0
    own = family.stored_names.get(inner, inner.replace(".experts.", ".experts.*."))
    for fused, parts in family.fused.items():
        if inner in parts:
            own, first, rows = fused, *_rows_of(inner, parts, arch)
    experts = arch.num_experts if "*" in own else 0
    return Stored(f"{before}.layers.{layer}.{own}.{kind}", first=first, rows=rows, experts=experts)


def _stored_by_gpt2(module: str, kind: str, arch: Architecture) -> Stored:
    if module in _GPT2:
        return Stored(f"{_GPT2[module]}.{kind}")
    _, _, layer, inner = module.split(".", 3)
    first, rows = _rows_of(inner, _FUSED, arch) if inner in _FUSED else (0, 0)
    is_turned = inner.endswith("_proj") and kind == "weight"
    return Stored(f"transformer.h.{layer}.{_GPT2[inner]}.{kind}", is_turned, first, rows)


def _rows_of(inner: str, parts: tuple[str, ...], arch: Architecture) -> tuple[int, int]:
    """(first row of `inner`, all rows) of the tensor that holds `parts` one after the other."""
    queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    sizes = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    rows = [sizes.get(part, arch.intermediate_size) for part in parts]
    return sum(rows[: parts.index(inner)]), sum(rows)


def hugging_face_names(arch: Architecture) -> dict[str, tuple[str, ...]]:
    """Every parameter -> the Hugging Face names that a user may call it by: two for a tied pair, and GPT-2's own for GPT-2,
    where one name means query, key and value."""
    names: dict[str, tuple[str, ...]] = {name: (stored_tensor(name, arch).name,) for name in parameter_shapes(arch)}
    if arch.tied:
        embedding, head = VOCABULARY
        names[embedding] += (head,)
    return names


def stored_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of the family's Hugging Face file -> its shape, in the order of the model."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, *rest) in parameter_shapes(arch).items():
        stored = stored_tensor(name, arch)
        if stored.experts:
            shapes.update(dict.fromkeys(stored.names, tuple(rest)))
            continue
        shape = (stored.rows or rows, *rest)
        shapes[stored.name] = shape[::-1] if stored.transposed else shape
    return shapes


def stored_bytes(shape: tuple[int, ...], item_bytes: int) -> int:
    return math.prod(shape) * item_bytes


def expected_name(key: str, arch: Architecture, known: dict[str, tuple[int, ...]]) -> str | None:
    """The tensor that a file's `key` means; None for what is not a parameter; `key` itself if nothing is known of it."""
    prefixed = BASE_PREFIX.get(arch.family, "model.") + key
    if key in known:
        return key
    if prefixed in known:
        return prefixed
    return None if CONSTANTS.fullmatch(key) else key
