"""ernie4_5's fields: Llama whose rope turns neighbouring channels. No torch."""

from typing import Any, ClassVar

from pydantic import Field

from windlass.model.architecture import Architecture
from windlass.model.families.family import Activation, Size
from windlass.model.families.llama_like import DecoderFields


class ErnieFields(DecoderFields):
    """`model_type: ernie4_5`: the dense ERNIE 4.5. Source: the ERNIE 4.5 technical report (Baidu, 2025)."""

    family: ClassVar[str] = "ernie4_5"
    default_theta: ClassVar[float] = 500000.0
    architecture_class: ClassVar[str] = "Ernie4_5ForCausalLM"

    num_key_value_heads: Size | None = 2
    """Key and value heads; 2 when left out, as many as query heads when null."""
    head_dim: Size | None = 128
    """Channels per head; 128 when left out, hidden_size / num_attention_heads when null."""
    hidden_act: Activation = "silu"
    """Activation of the MLP."""
    max_position_embeddings: Size = 131072
    """Longest sequence the model is meant for, in tokens; written to the export."""
    rms_norm_eps: float = Field(1e-5, ge=0.0)
    """Added to the mean square in RMSNorm."""
    pad_token_id: int | None = 0
    """Token id, written to the export. As in transformers, its embedding gets no gradient where it is read."""
    tie_word_embeddings: bool = True
    """Embedding and head are one matrix."""
    use_bias: bool | None = False
    """Biases in the projections of attention and MLP; none when null."""

    def extras(self) -> dict[str, Any]:
        biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), bool(self.use_bias))
        return {**biases, "rope_interleaved": True}

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        return {**super().from_architecture(arch), "use_bias": arch.qkv_bias}
