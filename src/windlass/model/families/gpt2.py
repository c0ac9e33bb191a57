"""GPT-2's Hugging Face fields. No torch."""

from typing import Any, ClassVar

from pydantic import Field

from windlass.errors import UserError
from windlass.model.architecture import Architecture, divisors
from windlass.model.families.family import (
    INFERENCE,
    NEVER,
    Activation,
    Family,
    Layers,
    Size,
    common_fields,
    token_ids_of,
)


class GPT2Fields(Family):
    """`model_type: gpt2`: learned positions, LayerNorm, biases, plain MLP. Source: Radford et al. 2019."""

    architecture_class: ClassVar[str] = "GPT2LMHeadModel"
    required: ClassVar[tuple[str, ...]] = ("n_embd", "n_layer", "n_head")
    aliases: ClassVar[dict[str, str]] = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }
    harmless: ClassVar[frozenset[str]] = INFERENCE | {
        "n_ctx",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
    }
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {
        **NEVER,
        "scale_attn_weights": (True, None),
        "scale_attn_by_inverse_layer_idx": (False, None),
        "reorder_and_upcast_attn": (False, None),
    }

    n_embd: Size
    """Width of the residual stream."""
    n_layer: Layers
    """Number of blocks."""
    n_head: Size
    """Heads."""
    n_positions: Size = 1024
    """Number of learned positions: the longest sequence, in tokens."""
    n_inner: Size | None = None
    """Width inside the MLP; 4 n_embd when left out."""
    activation_function: Activation = "gelu_new"
    """Activation of the MLP."""
    layer_norm_epsilon: float = Field(1e-5, ge=0.0)
    """Added to the variance in LayerNorm."""
    resid_pdrop: float = Field(0.1, ge=0.0, lt=1.0)
    """In training, probability that an element of what attention or MLP adds is dropped. 0 is usual in pretraining."""
    embd_pdrop: float = Field(0.1, ge=0.0, lt=1.0)
    """In training, probability that an element of the embedding (token and position) is dropped."""
    attn_pdrop: float = Field(0.1, ge=0.0, lt=1.0)
    """In training, probability that an attention weight is dropped. Above 0 attention runs unfused: about 3 times its time."""
    tie_word_embeddings: bool = True
    """Embedding and head are one matrix."""

    def to_architecture(self, vocab_size: int) -> Architecture:
        if self.n_embd % self.n_head:
            raise UserError(
                f"model: n_embd {self.n_embd} and n_head {self.n_head}",
                "the hidden size is a multiple of the number of heads",
                f"set n_head to one of {divisors(self.n_embd)}",
            )
        return Architecture(
            family="gpt2",
            vocab_size=vocab_size,
            hidden_size=self.n_embd,
            intermediate_size=4 * self.n_embd if self.n_inner is None else self.n_inner,
            num_layers=self.n_layer,
            num_heads=self.n_head,
            num_kv_heads=self.n_head,
            head_dim=self.n_embd // self.n_head,
            max_positions=self.n_positions,
            activation=self.activation_function,
            norm_eps=self.layer_norm_epsilon,
            initializer_range=self.initializer_range,
            tied=self.tie_word_embeddings,
            rope_theta=None,
            layer_norm=True,
            gated_mlp=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            resid_dropout=self.resid_pdrop,
            embd_dropout=self.embd_pdrop,
            attn_dropout=self.attn_pdrop,
            **token_ids_of(self),
        )

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        return {
            **common_fields(cls.architecture_class, arch),
            "n_embd": arch.hidden_size,
            "n_layer": arch.num_layers,
            "n_head": arch.num_heads,
            "n_positions": arch.max_positions,
            "n_inner": arch.intermediate_size,
            "activation_function": arch.activation,
            "layer_norm_epsilon": arch.norm_eps,
            "resid_pdrop": arch.resid_dropout,
            "embd_pdrop": arch.embd_dropout,
            "attn_pdrop": arch.attn_dropout,
        }
