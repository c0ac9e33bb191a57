"""phi3's fields: Llama whose files fuse query, key and value, and gate and up. No torch.

transformers knows two ropes here, default and longrope, and reads `yarn` and `su` as the second.
"""

from typing import Any, ClassVar

from pydantic import Field

from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.families.family import INFERENCE, NEVER, Size
from windlass.model.families.llama_like import PartialRotaryFields, Rope, Windows


class Phi3Fields(PartialRotaryFields):
    """`model_type: phi3`: Phi-3, Phi-3.5, Phi-4 and their mini sizes. Source: arXiv 2404.14219, 2412.08905."""

    family: ClassVar[str] = "phi3"
    architecture_class: ClassVar[str] = "Phi3ForCausalLM"
    # embd_pdrop: transformers reads it nowhere
    harmless: ClassVar[frozenset[str]] = INFERENCE | {"embd_pdrop", "original_max_position_embeddings"}
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {
        **NEVER,
        **dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), (False, None)),  # published files have these
        **dict.fromkeys(("full_attn_mod", "interpolate_factor"), (1, None)),
    }
    fused: ClassVar[dict[str, tuple[str, ...]]] = {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    }

    max_position_embeddings: Size = 4096
    """Longest sequence the model is meant for, in tokens; written to the export."""
    rms_norm_eps: float = Field(1e-5, ge=0.0)
    """Added to the mean square in RMSNorm."""
    resid_pdrop: float = Field(0.0, ge=0.0, lt=1.0)
    """In training, probability that an element of what attention or MLP adds is dropped."""
    sliding_window: Size | None = None
    """Tokens that a query sees, itself included; all of them when null."""
    pad_token_id: int | None = 32000
    """Token id, written to the export. As in transformers, its embedding gets no gradient where it is read."""

    def ropes(self) -> tuple[Rope, Rope | None]:
        given = self.rope_scaling or self.rope_parameters or {}
        kind = given.get("rope_type", given.get("type", "default"))
        if kind != "default":
            raise UserError(
                f"model: phi3 with rope_type {kind!r}",
                "transformers computes default and longrope for phi3; longrope has two sets of frequencies, and which holds"
                " depends on the longest row of a batch",
                "take a phi3 model without a scaled rope (Phi-3-mini-4k, Phi-4)",
            )
        return super().ropes()

    def extras(self) -> dict[str, Any]:
        return {**super().extras(), "resid_dropout": self.resid_pdrop}

    def windows(self) -> Windows:
        return self.sliding_window, tuple(range(self.num_hidden_layers))

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        return {
            **super().from_architecture(arch),
            "resid_pdrop": arch.resid_dropout,
            "sliding_window": arch.window,
        }
