"""gemma2's and gemma3's fields: norms before and after attention and MLP, that multiply by 1 + their weight. No torch.

The embedding is multiplied by sqrt(hidden_size): exactly here, where transformers rounds that number to the weights' dtype first
(by 1e-3 in bf16).
"""

from collections.abc import Iterable
from typing import Any, ClassVar, cast

from pydantic import Field

from windlass.model.architecture import Architecture
from windlass.model.families.family import INFERENCE, Activation, Size
from windlass.model.families.llama_like import DecoderFields, LayeredRopeFields, LayerTypesFields


class GemmaFields(LayerTypesFields):
    """What the two have in common."""

    activation_field: ClassVar[str] = "hidden_activation"
    needs_even_heads: ClassVar[bool] = True
    # published files have hidden_act beside hidden_activation; transformers reads it nowhere
    harmless: ClassVar[frozenset[str]] = INFERENCE | {"hidden_act"}
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {**DecoderFields.fixed, "use_bidirectional_attention": (False, None)}
    stored_names: ClassVar[dict[str, str]] = {
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    }

    num_key_value_heads: Size = 4
    """Key and value heads; 4 when left out."""
    head_dim: Size = 256
    """Channels per head; 256 when left out."""
    hidden_activation: Activation = "gelu_pytorch_tanh"
    """Activation of the MLP."""
    rms_norm_eps: float = Field(1e-6, ge=0.0)
    """Added to the mean square in RMSNorm."""
    pad_token_id: int | None = 0
    """Token id, written to the export. As in transformers, its embedding gets no gradient where it is read."""
    tie_word_embeddings: bool = True
    """Embedding and head are one matrix."""
    attention_bias: bool = False
    """Biases in the four attention projections."""
    attention_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """In training, probability that an attention weight is dropped. Above 0 attention runs unfused: about 3 times its time."""
    query_pre_attn_scalar: Size = 256
    """Attention's scores are divided by the root of this."""
    sliding_window: Size = 4096
    """Tokens that a query of a sliding layer sees, itself included."""
    final_logit_softcapping: float | None = Field(None, gt=0.0)
    """Logits l become c tanh(l / c) with this c; null: they stay."""

    def extras(self) -> dict[str, Any]:
        return {
            "norm_adds_one": True,
            "norm_outputs": True,
            "embedding_scale": self.hidden_size**0.5,
            "score_scale": self.query_pre_attn_scalar**-0.5,
            "logit_cap": self.final_logit_softcapping,
            "qkv_bias": self.attention_bias,
            "out_bias": self.attention_bias,
        }

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        return {
            **super().from_architecture(arch),
            "attention_bias": arch.qkv_bias,
            "query_pre_attn_scalar": round(cast(float, arch.score_scale) ** -2),
            "final_logit_softcapping": arch.logit_cap,
        }


class Gemma2Fields(GemmaFields):
    """`model_type: gemma2`: every second layer has a window; scores and logits are capped. Source: arXiv 2408.00118."""

    family: ClassVar[str] = "gemma2"
    architecture_class: ClassVar[str] = "Gemma2ForCausalLM"

    max_position_embeddings: Size = 8192
    """Longest sequence the model is meant for, in tokens; written to the export."""
    final_logit_softcapping: float | None = Field(30.0, gt=0.0)
    """Logits l become c tanh(l / c) with this c; null: they stay."""
    attn_logit_softcapping: float | None = Field(50.0, gt=0.0)
    """Attention's scores s become c tanh(s / c) with this c, and run unfused, which is slower; null: they stay."""

    def extras(self) -> dict[str, Any]:
        return {**super().extras(), "score_cap": self.attn_logit_softcapping}

    def windowed_by_rule(self) -> Iterable[int]:
        return range(0, self.num_hidden_layers, 2)

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        return {**super().from_architecture(arch), "attn_logit_softcapping": arch.score_cap}


class Gemma3Fields(GemmaFields, LayeredRopeFields):
    """`model_type: gemma3_text`: the text model of Gemma 3; five layers with a window and a rope of their own, then one without.
    Source: arXiv 2503.19786."""

    family: ClassVar[str] = "gemma3_text"
    qk_norm: ClassVar[bool] = True
    default_theta: ClassVar[float] = 1000000.0
    architecture_class: ClassVar[str] = "Gemma3ForCausalLM"
    harmless: ClassVar[frozenset[str]] = GemmaFields.harmless | {
        "_sliding_window_pattern"
    }  # what layer_types came from
    # transformers reads it nowhere in gemma3's forward
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {**GemmaFields.fixed, "attn_logit_softcapping": (None,)}

    max_position_embeddings: Size = 131072
    """Longest sequence the model is meant for, in tokens; written to the export."""
    rope_local_base_freq: float | None = Field(None, gt=0.0)
    """Base of the rotary frequencies in layers with a window; 10000 when left out."""
    sliding_window_pattern: Size = 6
    """Without layer_types: every Nth block has no window."""

    def window_theta(self) -> float:
        return self.rope_local_base_freq or 10000.0

    def windowed_by_rule(self) -> Iterable[int]:
        return [layer for layer in range(self.num_hidden_layers) if (layer + 1) % self.sliding_window_pattern]

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        theta, _ = arch.window_rope or (arch.rope_theta, None)
        return {**super().from_architecture(arch), "rope_local_base_freq": theta}
