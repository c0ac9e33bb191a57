"""The families by name, and the two that share Llama's fields. No torch.

A new family: a class with Hugging Face's fields and defaults, a line in FAMILIES, and what the decoder cannot do yet in
transformer.py.
"""

from typing import Any, ClassVar, Final, Literal

from pydantic import Field

from windlass.errors import UserError
from windlass.model.architecture import Architecture, divisors
from windlass.model.family import INFERENCE, NEVER, Activation, Family, Size, common_fields, token_ids_of
from windlass.model.gpt2 import GPT2Fields


class LlamaFields(Family):
    """`model_type: llama`: Llama 1 and 2, and what has their shape. Source: arXiv 2302.13971, 2307.09288."""

    family: ClassVar[str] = "llama"
    qk_norm: ClassVar[bool] = False
    architecture_class: ClassVar[str] = "LlamaForCausalLM"
    required: ClassVar[tuple[str, ...]] = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {
        **NEVER,
        "rope_scaling": (None, {}),
        "partial_rotary_factor": (None, 1, 1.0),
        "sliding_window": (None,),
    }

    hidden_size: Size
    """Width of the residual stream."""
    intermediate_size: Size
    """Width inside the MLP."""
    num_hidden_layers: Size
    """Number of blocks."""
    num_attention_heads: Size
    """Query heads."""
    num_key_value_heads: Size | None = None
    """Key and value heads; as many as query heads when left out."""
    head_dim: Size | None = None
    """Channels per head; hidden_size / num_attention_heads when left out."""
    hidden_act: Activation = "silu"
    """Activation of the MLP."""
    max_position_embeddings: Size = 2048
    """Longest sequence the model is meant for, in tokens; written to the export."""
    rms_norm_eps: float = Field(1e-6, ge=0.0)
    """Added to the mean square in RMSNorm."""
    rope_theta: float | None = Field(None, gt=0.0)
    """Base of the rotary frequencies; 10000 when left out."""
    rope_parameters: dict[str, Any] | None = None
    """transformers 5 keeps rope_theta here; only `rope_type: default`."""
    attention_bias: bool = False
    """Biases in the four attention projections."""
    mlp_bias: bool = False
    """Biases in the three MLP projections."""
    attention_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Probability; training needs 0."""
    tie_word_embeddings: bool = False
    """Embedding and head are one matrix."""

    def to_architecture(self, vocab_size: int) -> Architecture:
        heads = self.num_attention_heads
        if self.hidden_size % heads and (self.head_dim is None or self.family == "llama"):
            raise UserError(
                f"model: hidden_size {self.hidden_size} and {heads} attention heads",
                "the hidden size is a multiple of the number of heads",
                f"set num_attention_heads to one of {divisors(self.hidden_size)}",
            )
        return Architecture(
            family=self.family,
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=heads if self.num_key_value_heads is None else self.num_key_value_heads,
            head_dim=self.head_dim or self.hidden_size // heads,
            max_positions=self.max_position_embeddings,
            activation=self.hidden_act,
            norm_eps=self.rms_norm_eps,
            initializer_range=self.initializer_range,
            tied=self.tie_word_embeddings,
            rope_theta=self._theta(),
            qk_norm=self.qk_norm,
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
            attn_dropout=self.attention_dropout,
            **token_ids_of(self),
        )

    def _theta(self) -> float:
        """The one base of the frequencies. transformers gives rope_parameters the precedence over rope_theta."""
        given = dict(self.rope_parameters or {})
        theta = given.pop("rope_theta", None) or self.rope_theta or 10000.0
        if not isinstance(theta, int | float) or theta <= 0:
            raise UserError(f"model: rope_parameters.rope_theta is {theta!r}", "a base is above 0", "give a number")
        plain = {"rope_type": ("default", None), "type": ("default", None), "partial_rotary_factor": (None, 1, 1.0)}
        for name, value in given.items():
            if value not in plain.get(name, ()):
                raise UserError(
                    f"model: rope_parameters.{name} is {value!r}",
                    "only unscaled rotary positions are implemented; with others the model would be another one",
                    "take a model without rope scaling, or keep rope_theta alone",
                )
        return float(theta)

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        assert arch.rope_theta is not None and arch.qkv_bias == arch.out_bias
        return {
            **common_fields(cls.architecture_class, arch),
            "hidden_size": arch.hidden_size,
            "intermediate_size": arch.intermediate_size,
            "num_hidden_layers": arch.num_layers,
            "num_attention_heads": arch.num_heads,
            "num_key_value_heads": arch.num_kv_heads,
            "head_dim": arch.head_dim,
            "hidden_act": arch.activation,
            "max_position_embeddings": arch.max_positions,
            "rms_norm_eps": arch.norm_eps,
            "rope_theta": arch.rope_theta,  # read by transformers 4
            "rope_parameters": {"rope_type": "default", "rope_theta": arch.rope_theta},  # read by transformers 5
            "attention_bias": arch.qkv_bias,
            "attention_dropout": arch.attn_dropout,
            "mlp_bias": arch.mlp_bias,
        }


class Qwen3Fields(LlamaFields):
    """`model_type: qwen3`: RMSNorm on each query and key head, head_dim of its own. Source: arXiv 2505.09388."""

    family: ClassVar[str] = "qwen3"
    qk_norm: ClassVar[bool] = True
    architecture_class: ClassVar[str] = "Qwen3ForCausalLM"
    harmless: ClassVar[frozenset[str]] = INFERENCE | {"sliding_window", "max_window_layers"}  # use_sliding_window rules
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {
        **NEVER,
        "rope_scaling": (None, {}),
        "partial_rotary_factor": (None, 1, 1.0),
        "use_sliding_window": (False, None),
        "mlp_bias": (False, None),
    }

    num_key_value_heads: Size | None = 32
    """Key and value heads; 32 when left out, as many as query heads when null."""
    head_dim: Size | None = 128
    """Channels per head; 128 when left out."""
    max_position_embeddings: Size = 32768
    """Longest sequence the model is meant for, in tokens; written to the export."""
    layer_types: list[Literal["full_attention"]] | None = None
    """Kind of attention per block; only full attention."""

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        fields = super().from_architecture(arch)
        del fields["mlp_bias"]
        return {**fields, "use_sliding_window": False}


FAMILIES: Final[dict[str, type[Family]]] = {"qwen3": Qwen3Fields, "llama": LlamaFields, "gpt2": GPT2Fields}
