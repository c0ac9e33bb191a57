"""The families by name. Those that are nearly Llama are here, the others have files of their own. No torch.

How to add one: docs/howto/add-a-family.md.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, Final, Literal

from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.families.cohere2 import Cohere2Fields
from windlass.model.families.ernie import ErnieFields
from windlass.model.families.exaone4 import Exaone4Fields
from windlass.model.families.family import INFERENCE, Family, Size
from windlass.model.families.gemma import Gemma2Fields, Gemma3Fields
from windlass.model.families.glm4 import Glm4Fields
from windlass.model.families.gpt2 import GPT2Fields
from windlass.model.families.granite import GraniteFields
from windlass.model.families.llama_like import RotaryFields, WindowedFields, Windows
from windlass.model.families.mixtral import MixtralFields
from windlass.model.families.olmo import Olmo2Fields, Olmo3Fields
from windlass.model.families.phi3 import Phi3Fields
from windlass.model.families.qwen3_moe import Qwen3MoeFields
from windlass.model.families.starcoder2 import Starcoder2Fields


class LlamaFields(RotaryFields):
    """`model_type: llama`: Llama 1 to 3, and what has their shape. Source: arXiv 2302.13971, 2307.09288, 2407.21783."""

    family: ClassVar[str] = "llama"
    architecture_class: ClassVar[str] = "LlamaForCausalLM"
    needs_even_heads: ClassVar[bool] = True
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {
        **RotaryFields.fixed,
        "sliding_window": (None,),
        "rope_interleaved": (False, None),  # this and the next are in SmolLM2's config.json
        "is_llama_config": (True, None),
    }

    attention_bias: bool = False
    """Biases in the four attention projections."""
    mlp_bias: bool = False
    """Biases in the three MLP projections."""

    def extras(self) -> dict[str, Any]:
        return {"qkv_bias": self.attention_bias, "out_bias": self.attention_bias, "mlp_bias": self.mlp_bias}

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        return {**super().from_architecture(arch), "attention_bias": arch.qkv_bias, "mlp_bias": arch.mlp_bias}


class MistralFields(RotaryFields):
    """`model_type: mistral`: Llama's shape, with one sliding window in every layer. Source: arXiv 2310.06825."""

    family: ClassVar[str] = "mistral"
    architecture_class: ClassVar[str] = "MistralForCausalLM"

    num_key_value_heads: Size = 8
    """Key and value heads; 8 when left out."""
    max_position_embeddings: Size = 131072
    """Longest sequence the model is meant for, in tokens; written to the export."""
    sliding_window: Size | None = 4096
    """Tokens that a query sees, itself included; all of them when null."""

    def windows(self) -> Windows:
        return self.sliding_window, tuple(range(self.num_hidden_layers))

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        return {**super().from_architecture(arch), "sliding_window": arch.window}


class Qwen2Fields(WindowedFields):
    """`model_type: qwen2`: Qwen2 and Qwen2.5; biases in query, key and value. Source: arXiv 2407.10671, 2412.15115."""

    family: ClassVar[str] = "qwen2"
    architecture_class: ClassVar[str] = "Qwen2ForCausalLM"
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {**RotaryFields.fixed, "use_mrope": (False, None)}

    num_key_value_heads: Size | None = 32
    """Key and value heads; 32 when left out, as many as query heads when null."""
    max_position_embeddings: Size = 32768
    """Longest sequence the model is meant for, in tokens; written to the export."""
    sliding_window: Size | None = 4096
    """Tokens that a query sees in the windowed layers, itself included; without effect unless use_sliding_window."""
    max_window_layers: int = 28
    """With use_sliding_window: the number of first layers that have full attention; the others have the window."""

    def extras(self) -> dict[str, Any]:
        return {"qkv_bias": True}

    def windowed_by_rule(self) -> Iterable[int]:
        return range(max(0, self.max_window_layers), self.num_hidden_layers)

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        fields = super().from_architecture(arch)
        return fields if arch.window is None else {**fields, "max_window_layers": min(arch.window_layers)}


class Qwen3Fields(Qwen2Fields):
    """`model_type: qwen3`: RMSNorm on each query and key head, head_dim of its own. Source: arXiv 2505.09388."""

    family: ClassVar[str] = "qwen3"
    qk_norm: ClassVar[bool] = True
    architecture_class: ClassVar[str] = "Qwen3ForCausalLM"
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {**RotaryFields.fixed, "mlp_bias": (False, None)}

    head_dim: Size | None = 128
    """Channels per head; 128 when left out."""
    attention_bias: bool = False
    """Biases in the four attention projections."""

    def extras(self) -> dict[str, Any]:
        return {"qkv_bias": self.attention_bias, "out_bias": self.attention_bias}

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        return {**super().from_architecture(arch), "attention_bias": arch.qkv_bias}


class SmolLM3Fields(WindowedFields):
    """`model_type: smollm3`: Llama's shape, with layers without positions. Source: the model card of SmolLM3-3B."""

    family: ClassVar[str] = "smollm3"
    default_theta: ClassVar[float] = 2000000.0
    architecture_class: ClassVar[str] = "SmolLM3ForCausalLM"
    harmless: ClassVar[frozenset[str]] = INFERENCE | {"max_window_layers"}  # transformers reads it nowhere

    num_key_value_heads: Size | None = 4
    """Key and value heads; 4 when left out, as many as query heads when null."""
    max_position_embeddings: Size = 32768
    """Longest sequence the model is meant for, in tokens; written to the export."""
    pad_token_id: int | None = 128004
    """Token id, written to the export. As in transformers, its embedding gets no gradient where it is read."""
    no_rope_layers: list[Literal[0, 1]] | None = None
    """Per block: 1 with rotary positions, 0 without any."""
    no_rope_layer_interval: Size = 4
    """Without no_rope_layers: every Nth block has no positions."""
    attention_bias: bool = False
    """Biases in the four attention projections."""
    mlp_bias: bool = False
    """Biases in the three MLP projections."""
    tie_word_embeddings: bool = True
    """Embedding and head are one matrix."""

    def extras(self) -> dict[str, Any]:
        bias = self.attention_bias
        return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": self.mlp_bias, "unrotated_layers": self._unrotated()}

    def windowed_by_rule(self) -> Iterable[int]:
        return self._unrotated()

    def _unrotated(self) -> tuple[int, ...]:
        count, every = self.num_hidden_layers, self.no_rope_layer_interval
        if self.no_rope_layers is None:
            return tuple(range(every - 1, count, every))
        if len(self.no_rope_layers) < count:
            raise UserError(
                f"model: {len(self.no_rope_layers)} no_rope_layers and num_hidden_layers {count}",
                "no_rope_layers says of every layer whether it has rotary positions",
                f"give {count} of them, or model.no_rope_layers=null for one in no_rope_layer_interval",
            )
        return tuple(layer for layer in range(count) if not self.no_rope_layers[layer])

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        return {
            **super().from_architecture(arch),
            "attention_bias": arch.qkv_bias,
            "mlp_bias": arch.mlp_bias,
            "no_rope_layers": [int(layer not in arch.unrotated_layers) for layer in range(arch.num_layers)],
            "no_rope_layer_interval": min(arch.unrotated_layers, default=arch.num_layers) + 1,  # the list rules
        }


FAMILIES: Final[dict[str, type[Family]]] = {
    "qwen3": Qwen3Fields,
    "llama": LlamaFields,
    "gpt2": GPT2Fields,
    "mistral": MistralFields,
    "qwen2": Qwen2Fields,
    "smollm3": SmolLM3Fields,
    "qwen3_moe": Qwen3MoeFields,
    "mixtral": MixtralFields,
    "olmo2": Olmo2Fields,
    "granite": GraniteFields,
    "phi3": Phi3Fields,
    "gemma3_text": Gemma3Fields,
    "gemma2": Gemma2Fields,
    "olmo3": Olmo3Fields,
    "starcoder2": Starcoder2Fields,
    "glm4": Glm4Fields,
    "exaone4": Exaone4Fields,
    "ernie4_5": ErnieFields,
    "cohere2": Cohere2Fields,
}
# the first letters of a model_type that is not here -> the nearest one that is, and what it lacks
NEAREST: Final[dict[str, tuple[str, str]]] = {
    "gemma": ("gemma2", "no norms after attention and MLP"),
    "gemma3": ("gemma3_text", "images: its text model is a family of its own"),
    "gemma3n": ("gemma3_text", "embeddings for each layer, and several residual streams"),
    "phi": ("gpt2", "attention and MLP run side by side, with partly rotated heads"),
    "phi4_multimodal": ("phi3", "images and sound"),
    "phimoe": ("mixtral", "a router of its own kind"),
    "ministral": ("mistral", "windows that differ by layer"),
    "qwen2_moe": ("qwen3_moe", "a shared expert beside the others, and no norms in attention"),
    "qwen3_next": ("qwen3_moe", "gated delta networks, a state in place of attention, in three of four layers"),
    "qwen2_vl": ("qwen2", "images, and rotary positions in three directions"),
    "deepseek": ("llama", "latent attention and mixtures of experts"),
    "deepseek_v2": ("qwen3_moe", "latent attention (keys and values from one small vector), and shared experts"),
    "deepseek_v3": ("qwen3_moe", "latent attention, and experts chosen in groups by biased scores, with shared ones"),
    "llama4": ("mixtral", "attention in pieces of the row, with a temperature by position, and shared experts"),
    "gpt_oss": ("qwen3_moe", "attention sinks, biased and clamped experts, and weights of 4 bits"),
    "gpt_neox": ("gpt2", "attention and MLP run side by side, with rotary positions"),
    "gptj": ("gpt2", "attention and MLP run side by side, with rotary positions"),
    "gpt_neo": ("gpt2", "local attention, unscaled"),
    "gpt_bigcode": ("gpt2", "one key and value head"),
    "opt": ("gpt2", "positions that begin at 2"),
    "bloom": ("gpt2", "distances in the scores in place of positions"),
    "falcon": ("llama", "attention and MLP run side by side"),
    "olmo": ("llama", "norms without weights"),
    "olmoe": ("olmo2", "mixtures of experts"),
    "granitemoe": ("granite", "mixtures of experts"),
    "cohere": ("cohere2", "no windows, and norms on queries and keys"),
    "exaone": ("exaone4", "norms and names of another kind"),
    "ernie4_5_moe": ("ernie4_5", "mixtures of experts"),
    "stablelm": ("llama", "LayerNorm, and partly rotated heads"),
    "glm": ("glm4", "no norms after attention and MLP"),
    "glm4_moe": ("glm4", "mixtures of experts"),
    "mamba": ("llama", "state spaces in place of attention"),
}


def add_family(fields: type[Family]) -> None:
    """A family of the caller's own, in this process, by the name `fields.family`. Raises UserError for what is no family, and for
    a name that another one has."""
    name = getattr(fields, "family", None)
    if not (isinstance(fields, type) and issubclass(fields, Family) and isinstance(name, str)):
        raise UserError(
            f"family={fields!r}",
            "a family is a class of windlass.model.families, with its name in `family`",
            "derive it from Family, or from a family that is near it: docs/howto/own-family.md",
        )
    if FAMILIES.setdefault(name, fields) is not fields:
        raise UserError(f"a family {name!r} of your own", f"{name} is a family already", "give it another name")


def to_hf(arch: Architecture) -> dict[str, object]:
    """The config.json from which transformers builds the same model."""
    return FAMILIES[arch.family].from_architecture(arch)
