"""qwen3_moe's fields: Qwen3 whose MLPs are mixtures of experts. No torch.

A layer is sparse unless `mlp_only_layers` names it or `decoder_sparse_step` leaves it out. transformers trains on the routers'
load-balancing loss only where `output_router_logits` is true, and so it is here. A sliding window holds in every layer.
"""

from typing import Any, ClassVar

from pydantic import Field

from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.families.family import INFERENCE, Size
from windlass.model.families.llama_like import RotaryFields, Windows, check_window


def check_router_loss(own: dict[str, Any], merged: dict[str, Any]) -> None:
    """Raises UserError where a recipe gives a factor of the routers' loss, which is not trained on."""
    if own.get("router_aux_loss_coef") is not None and not merged.get("output_router_logits"):
        raise UserError(
            f"model: router_aux_loss_coef: {own['router_aux_loss_coef']} without output_router_logits",
            "the routers' loss is trained on only where output_router_logits is true, as in transformers",
            "add model.output_router_logits=true, or remove router_aux_loss_coef",
        )


def experts_loop(arch: Architecture) -> dict[str, object]:
    """The entry of config.json for experts of odd widths: transformers' default, one grouped product, takes only rows of whole 16
    bytes (8 numbers in bf16), and raises at the first token otherwise."""
    is_grouped = arch.hidden_size % 8 == 0 and arch.expert_size % 8 == 0
    return {} if is_grouped or not arch.sparse_layers else {"experts_implementation": "eager"}


class Qwen3MoeFields(RotaryFields):
    """`model_type: qwen3_moe`: Qwen3's attention, and experts instead of MLPs. Source: arXiv 2505.09388."""

    family: ClassVar[str] = "qwen3_moe"
    qk_norm: ClassVar[bool] = True
    architecture_class: ClassVar[str] = "Qwen3MoeForCausalLM"
    required: ClassVar[tuple[str, ...]] = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    aliases: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}  # as transformers 5 writes it
    harmless: ClassVar[frozenset[str]] = INFERENCE | {"max_window_layers"}  # in hub files; read nowhere

    intermediate_size: Size = 6144
    """Width inside the MLPs of layers without experts."""
    num_key_value_heads: Size = 4
    """Key and value heads; 4 when left out."""
    max_position_embeddings: Size = 32768
    """Longest sequence the model is meant for, in tokens; written to the export."""
    attention_bias: bool = False
    """Biases in the four attention projections."""
    use_sliding_window: bool = False
    """Every layer sees the last sliding_window tokens only."""
    sliding_window: Size | None = 4096
    """That many tokens, itself included; without effect unless use_sliding_window."""
    num_experts: Size = 128
    """Experts of each sparse layer."""
    num_experts_per_tok: Size = 8
    """Experts that each token goes to."""
    moe_intermediate_size: Size = 768
    """Width inside each expert."""
    norm_topk_prob: bool = False
    """The router's probabilities of a token's experts are divided by their sum."""
    decoder_sparse_step: Size = 1
    """Every Nth layer is sparse."""
    mlp_only_layers: list[int] | None = []
    """Layers with one MLP instead of experts, by index from 0."""
    output_router_logits: bool = False
    """In training, the routers' load-balancing loss is added to the loss: without it few experts may come to do all the work."""
    router_aux_loss_coef: float = Field(0.001, ge=0.0)
    """What that loss is multiplied by; without effect unless output_router_logits."""

    def extras(self) -> dict[str, Any]:
        dense = self._dense_layers()
        if self.output_router_logits and len(dense) == self.num_hidden_layers:
            raise UserError(
                f"model: output_router_logits: true and no sparse layer among {self.num_hidden_layers}",
                "a load-balancing loss is of routers, which only sparse layers have",
                "set model.decoder_sparse_step=1 and model.mlp_only_layers=[], or take family qwen3",
            )
        return {
            "qkv_bias": self.attention_bias,
            "out_bias": self.attention_bias,
            "num_experts": self.num_experts,
            "experts_per_token": self.num_experts_per_tok,
            "expert_size": self.moe_intermediate_size,
            "normed_weights": self.norm_topk_prob,
            "router_loss": self.output_router_logits,
            "router_loss_scale": self.router_aux_loss_coef,
            "dense_layers": dense,
        }

    def _dense_layers(self) -> tuple[int, ...]:
        only, step = self.mlp_only_layers or [], self.decoder_sparse_step
        return tuple(layer for layer in range(self.num_hidden_layers) if layer in only or (layer + 1) % step)

    def windows(self) -> Windows:
        return self.sliding_window if self.use_sliding_window else None, tuple(range(self.num_hidden_layers))

    @classmethod
    def check_own(cls, own: dict[str, Any], merged: dict[str, Any]) -> None:
        check_window(cls, own, merged)
        check_router_loss(own, merged)

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        return {
            **super().from_architecture(arch),
            "attention_bias": arch.qkv_bias,
            "use_sliding_window": arch.window is not None,
            "sliding_window": arch.window,
            "num_experts": arch.num_experts,
            "num_experts_per_tok": arch.experts_per_token,
            "moe_intermediate_size": arch.expert_size,
            "norm_topk_prob": arch.normed_weights,
            "decoder_sparse_step": 1,  # the list rules
            "mlp_only_layers": list(arch.dense_layers),
            "output_router_logits": arch.router_loss,
            "router_aux_loss_coef": arch.router_loss_scale,
            **experts_loop(arch),
        }
