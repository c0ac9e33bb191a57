"""cohere2's fields: attention and MLP side by side on one LayerNorm, and layers without positions. No torch."""

from collections.abc import Iterable
from typing import Any, ClassVar

from pydantic import Field

from windlass.model.architecture import Architecture
from windlass.model.families.family import INFERENCE, Activation, Size
from windlass.model.families.llama_like import DecoderFields, LayerTypesFields


class Cohere2Fields(LayerTypesFields):
    """`model_type: cohere2`: Command R7B and Command A; layers with a window rotate, the others have no positions. Source: arXiv
    2504.00698."""

    family: ClassVar[str] = "cohere2"
    epsilon_field: ClassVar[str] = "layer_norm_eps"
    architecture_class: ClassVar[str] = "Cohere2ForCausalLM"
    # published files have these and the next; transformers reads them nowhere
    harmless: ClassVar[frozenset[str]] = INFERENCE | {"use_embedding_sharing", "use_parallel_embedding"}
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {
        **DecoderFields.fixed,
        "use_qk_norm": (False, None),
        "use_parallel_block": (True, None),
        "use_gated_activation": (True, None),
        "rotary_pct": (1.0, None),
        "position_embedding_type": ("rope_gptj", None),
        "order_of_interleaved_layers": ("local_attn_first", None),
    }

    hidden_act: Activation = "silu"
    """Activation of the MLP."""
    max_position_embeddings: Size = 8192
    """Longest sequence the model is meant for, in tokens; written to the export."""
    layer_norm_eps: float = Field(1e-5, ge=0.0)
    """Added to the variance in LayerNorm, which has no bias."""
    pad_token_id: int | None = 0
    """Token id, written to the export. As in transformers, its embedding gets no gradient where it is read."""
    tie_word_embeddings: bool = True
    """Embedding and head are one matrix."""
    attention_bias: bool = False
    """Biases in the four attention projections."""
    attention_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """In training, probability that an attention weight is dropped. Above 0 attention runs unfused: about 3 times its time."""
    logit_scale: float = Field(0.0625, gt=0.0)
    """What logits are multiplied by."""
    sliding_window: Size = 4096
    """Tokens that a query of a sliding layer sees, itself included."""
    sliding_window_pattern: Size = 4
    """Without layer_types: every Nth block has no window and no positions."""

    def extras(self) -> dict[str, Any]:
        full = tuple(sorted(set(range(self.num_hidden_layers)) - set(self.windows()[1])))
        return {
            "layer_norm": True,
            "norm_bias": False,
            "parallel_block": True,
            "rope_interleaved": True,
            "unrotated_layers": full,
            "logit_scale": self.logit_scale,
            "qkv_bias": self.attention_bias,
            "out_bias": self.attention_bias,
        }

    def windowed_by_rule(self) -> Iterable[int]:
        return [layer for layer in range(self.num_hidden_layers) if (layer + 1) % self.sliding_window_pattern]

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        return {**super().from_architecture(arch), "attention_bias": arch.qkv_bias, "logit_scale": arch.logit_scale}
