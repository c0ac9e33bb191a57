"""mixtral's fields: Mistral whose MLPs are mixtures of experts. No torch.

Its files call the experts' gate, up and down w1, w3 and w2, and the MLP block_sparse_moe. The probabilities of a token's experts
are divided by their sum, which is the softmax of the chosen ones' logits.
"""

from typing import Any, ClassVar

from pydantic import Field

from windlass.model.architecture import Architecture
from windlass.model.families.family import Size
from windlass.model.families.llama_like import RotaryFields, Windows
from windlass.model.families.qwen3_moe import check_router_loss, experts_loop


class MixtralFields(RotaryFields):
    """`model_type: mixtral`: Mistral's attention, and experts instead of every MLP. Source: arXiv 2401.04088."""

    family: ClassVar[str] = "mixtral"
    default_theta: ClassVar[float] = 1000000.0
    architecture_class: ClassVar[str] = "MixtralForCausalLM"
    aliases: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts"}
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {**RotaryFields.fixed, "router_jitter_noise": (0.0, None)}
    stored_names: ClassVar[dict[str, str]] = {
        "mlp.gate": "block_sparse_moe.gate",
        "mlp.experts.gate_proj": "block_sparse_moe.experts.*.w1",
        "mlp.experts.up_proj": "block_sparse_moe.experts.*.w3",
        "mlp.experts.down_proj": "block_sparse_moe.experts.*.w2",
    }

    intermediate_size: Size
    """Width inside each expert."""
    num_key_value_heads: Size = 8
    """Key and value heads; 8 when left out."""
    max_position_embeddings: Size = 131072
    """Longest sequence the model is meant for, in tokens; written to the export."""
    rms_norm_eps: float = Field(1e-5, ge=0.0)
    """Added to the mean square in RMSNorm."""
    sliding_window: Size | None = None
    """Tokens that a query sees, itself included; all of them when null."""
    num_local_experts: Size = 8
    """Experts of each layer."""
    num_experts_per_tok: Size = 2
    """Experts that each token goes to."""
    output_router_logits: bool = False
    """In training, the routers' load-balancing loss is added to the loss: without it few experts may come to do all the work."""
    router_aux_loss_coef: float = Field(0.001, ge=0.0)
    """What that loss is multiplied by; without effect unless output_router_logits."""

    def extras(self) -> dict[str, Any]:
        return {
            "num_experts": self.num_local_experts,
            "experts_per_token": self.num_experts_per_tok,
            "expert_size": self.intermediate_size,
            "normed_weights": True,
            "router_loss": self.output_router_logits,
            "router_loss_scale": self.router_aux_loss_coef,
        }

    def windows(self) -> Windows:
        return self.sliding_window, tuple(range(self.num_hidden_layers))

    @classmethod
    def check_own(cls, own: dict[str, Any], merged: dict[str, Any]) -> None:
        check_router_loss(own, merged)

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        return {
            **super().from_architecture(arch),
            "intermediate_size": arch.expert_size,
            "sliding_window": arch.window,
            "num_local_experts": arch.num_experts,
            "num_experts_per_tok": arch.experts_per_token,
            "output_router_logits": arch.router_loss,
            "router_aux_loss_coef": arch.router_loss_scale,
            **experts_loop(arch),
        }
