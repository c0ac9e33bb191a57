"""olmo2's and olmo3's fields: no norm before attention and MLP, one on what each adds, and norms over all heads. No torch."""

from collections.abc import Iterable
from typing import Any, ClassVar, Final

from pydantic import Field

from windlass.model.architecture import Architecture
from windlass.model.families.family import Size
from windlass.model.families.llama_like import LayeredRopeFields, RotaryFields

NORMS_AFTER: Final = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
"""What families without norms before attention and MLP call those after."""


class Olmo2Fields(RotaryFields):
    """`model_type: olmo2`: norms behind attention and MLP, and over all queries and keys of a token. Source: arXiv 2501.00656."""

    family: ClassVar[str] = "olmo2"
    qk_norm: ClassVar[bool] = True
    architecture_class: ClassVar[str] = "Olmo2ForCausalLM"
    stored_names: ClassVar[dict[str, str]] = NORMS_AFTER

    rms_norm_eps: float = Field(1e-5, ge=0.0)
    """Added to the mean square in RMSNorm."""
    pad_token_id: int | None = 1
    """Token id, written to the export. As in transformers, its embedding gets no gradient where it is read."""
    attention_bias: bool = False
    """Biases in the four attention projections."""

    def extras(self) -> dict[str, Any]:
        norms = {"norm_inputs": False, "norm_outputs": True, "qk_norm_whole": True}
        return {**norms, "qkv_bias": self.attention_bias, "out_bias": self.attention_bias}

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        return {**super().from_architecture(arch), "attention_bias": arch.qkv_bias}


class Olmo3Fields(Olmo2Fields, LayeredRopeFields):
    """`model_type: olmo3`: olmo2 with a window in three of four layers, which keep an unscaled rope. Source: arXiv 2512.13961."""

    family: ClassVar[str] = "olmo3"
    default_theta: ClassVar[float] = 500000.0
    architecture_class: ClassVar[str] = "Olmo3ForCausalLM"

    sliding_window: Size = 4096
    """Tokens that a query of a sliding layer sees, itself included."""

    def windowed_by_rule(self) -> Iterable[int]:
        return [layer for layer in range(self.num_hidden_layers) if (layer + 1) % 4]
