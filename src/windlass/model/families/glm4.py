"""glm4's fields: norms around attention and MLP, half of a head's channels rotated in neighbouring pairs. No torch."""

from dataclasses import replace
from typing import Any, ClassVar, Final

from pydantic import Field

from windlass.model.architecture import Architecture
from windlass.model.families.family import Size
from windlass.model.families.llama_like import PartialRotaryFields

ENDS: Final = (151329, 151336, 151338)
"""Where generation stops if config.json names no eos_token_id, or null: as transformers has it."""


class Glm4Fields(PartialRotaryFields):
    """`model_type: glm4`: GLM-4-0414 in its dense sizes. Source: arXiv 2406.12793, and the model cards."""

    family: ClassVar[str] = "glm4"
    architecture_class: ClassVar[str] = "Glm4ForCausalLM"
    fused: ClassVar[dict[str, tuple[str, ...]]] = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}

    num_key_value_heads: Size = 2
    """Key and value heads; 2 when left out."""
    head_dim: Size = 128
    """Channels per head; 128 when left out."""
    max_position_embeddings: Size = 131072
    """Longest sequence the model is meant for, in tokens; written to the export."""
    rms_norm_eps: float = Field(0.00000015625, ge=0.0)
    """Added to the mean square in RMSNorm."""
    partial_rotary_factor: float | None = Field(0.5, gt=0.0, le=1.0)
    """Share of a head's channels that are rotated, the first ones; all when null."""
    attention_bias: bool = True
    """Biases in query, key and value."""
    pad_token_id: int | None = 151329
    """Token id, written to the export. As in transformers, its embedding gets no gradient where it is read."""

    def to_architecture(self, vocab_size: int) -> Architecture:
        architecture = super().to_architecture(vocab_size)
        return architecture if self.eos_token_id is not None else replace(architecture, eos_token_id=ENDS)

    def extras(self) -> dict[str, Any]:
        own = {"norm_outputs": True, "rope_interleaved": True, "qkv_bias": self.attention_bias}
        return {**super().extras(), **own}

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        return {**super().from_architecture(arch), "attention_bias": arch.qkv_bias}
