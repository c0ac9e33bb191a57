"""starcoder2's fields: GPT-2's block with rotary positions and grouped heads. No torch."""

from typing import Any, ClassVar

from pydantic import Field

from windlass.model.architecture import Architecture
from windlass.model.families.family import INFERENCE, Activation, Size
from windlass.model.families.llama_like import DecoderFields, Windows


class Starcoder2Fields(DecoderFields):
    """`model_type: starcoder2`: LayerNorm, biases, plain MLP, rotary positions, a window in every layer. Source: arXiv
    2402.19173."""

    family: ClassVar[str] = "starcoder2"
    epsilon_field: ClassVar[str] = "norm_epsilon"
    architecture_class: ClassVar[str] = "Starcoder2ForCausalLM"
    # published files have these and the next; transformers reads them nowhere
    harmless: ClassVar[frozenset[str]] = INFERENCE | {
        "activation_function",
        "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",
    }
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {
        **DecoderFields.fixed,
        "mlp_type": ("default", None),
        "norm_type": ("layer_norm", None),
        "scale_attn_weights": (True, None),
    }
    stored_names: ClassVar[dict[str, str]] = {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}

    num_key_value_heads: Size = 2
    """Key and value heads; 2 when left out."""
    hidden_act: Activation = "gelu_pytorch_tanh"
    """Activation of the MLP."""
    max_position_embeddings: Size = 4096
    """Longest sequence the model is meant for, in tokens; written to the export."""
    initializer_range: float = Field(0.018042, ge=0.0, le=1.0)
    """Standard deviation of the initial matrices; output projections have it divided by sqrt(2 layers)."""
    norm_epsilon: float = Field(1e-5, ge=0.0)
    """Added to the variance in LayerNorm."""
    use_bias: bool = True
    """Biases in the projections of attention and MLP."""
    sliding_window: Size | None = None
    """Tokens that a query sees, itself included; all of them when null."""
    attention_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """In training, probability that an attention weight is dropped. Above 0 attention runs unfused: about 3 times its time."""
    residual_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """In training, probability that an element of what attention or MLP adds is dropped."""
    embedding_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """In training, probability that an element of the embedding is dropped."""
    tie_word_embeddings: bool = True
    """Embedding and head are one matrix."""

    def extras(self) -> dict[str, Any]:
        return {
            "layer_norm": True,
            "gated_mlp": False,
            "qkv_bias": self.use_bias,
            "out_bias": self.use_bias,
            "mlp_bias": self.use_bias,
            "resid_dropout": self.residual_dropout,
            "embd_dropout": self.embedding_dropout,
        }

    def windows(self) -> Windows:
        return self.sliding_window, tuple(range(self.num_hidden_layers))

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        return {
            **super().from_architecture(arch),
            "use_bias": arch.qkv_bias,
            "sliding_window": arch.window,
            "residual_dropout": arch.resid_dropout,
            "embedding_dropout": arch.embd_dropout,
        }
