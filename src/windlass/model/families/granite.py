"""granite's fields: Llama with four constant factors. No torch."""

from typing import Any, ClassVar

from pydantic import Field

from windlass.model.architecture import Architecture
from windlass.model.families.llama_like import RotaryFields


class GraniteFields(RotaryFields):
    """`model_type: granite`: Llama's shape, and factors on embedding, scores, residuals and logits, which muP asks for. Source:
    arXiv 2408.13359."""

    family: ClassVar[str] = "granite"
    architecture_class: ClassVar[str] = "GraniteForCausalLM"

    attention_bias: bool = False
    """Biases in the four attention projections."""
    mlp_bias: bool = False
    """Biases in the three MLP projections."""
    embedding_multiplier: float = Field(1.0, gt=0.0)
    """What a token's embedding is multiplied by."""
    attention_multiplier: float = Field(1.0, gt=0.0)
    """Factor on attention's scores, instead of 1 / sqrt(head_dim)."""
    residual_multiplier: float = Field(1.0, gt=0.0)
    """What attention and MLP add to the stream is multiplied by this."""
    logits_scaling: float = Field(1.0, gt=0.0)
    """What logits are divided by."""

    def extras(self) -> dict[str, Any]:
        return {
            "qkv_bias": self.attention_bias,
            "out_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "embedding_scale": self.embedding_multiplier,
            "score_scale": self.attention_multiplier,
            "residual_scale": self.residual_multiplier,
            "logit_scale": 1.0 / self.logits_scaling,
        }

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        divisor = 1.0 / arch.logit_scale
        whole = float(round(divisor))  # 1 / (1 / 49) is not 49
        return {
            **super().from_architecture(arch),
            "attention_bias": arch.qkv_bias,
            "mlp_bias": arch.mlp_bias,
            "embedding_multiplier": arch.embedding_scale,
            "attention_multiplier": arch.score_scale,
            "residual_multiplier": arch.residual_scale,
            "logits_scaling": whole if whole and 1.0 / whole == arch.logit_scale else divisor,
        }
