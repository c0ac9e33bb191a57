"""What the families with rotary positions share: Llama's fields, and the two ways to name a sliding window. No torch."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from pydantic import Field

from windlass.errors import UserError
from windlass.model.architecture import Architecture, divisors
from windlass.model.families.family import NEVER, Activation, Family, Size, common_fields, token_ids_of
from windlass.model.families.rope_scaling import read_rope

Windows = tuple[int | None, tuple[int, ...]]  # keys that a query sees, and the layers where that holds


class RotaryFields(Family):
    """RMSNorm, rotary positions, grouped heads, gated MLP. A family adds what it has besides, and says it in `extras`."""

    family: ClassVar[str]
    default_theta: ClassVar[float] = 10000.0
    qk_norm: ClassVar[bool] = False
    required: ClassVar[tuple[str, ...]] = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {**NEVER, "partial_rotary_factor": (None, 1, 1.0)}

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
    """Base of the rotary frequencies; 10000 when left out (smollm3: 2000000)."""
    rope_scaling: dict[str, Any] | None = None
    """Rotary positions stretched, as transformers 4 writes it; rope_type is linear, llama3 or yarn."""
    rope_parameters: dict[str, Any] | None = None
    """The same as transformers 5 writes it, with rope_theta inside; rope_type may be default too."""
    attention_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """In training, probability that an attention weight is dropped. Above 0 attention runs unfused: about 3 times its time."""
    tie_word_embeddings: bool = False
    """Embedding and head are one matrix."""

    def extras(self) -> dict[str, Any]:
        """Fields of the Architecture beyond the shared ones."""
        return {}

    def windows(self) -> Windows:
        return None, ()

    def to_architecture(self, vocab_size: int) -> Architecture:
        heads = self.num_attention_heads
        if self.hidden_size % heads and (self.head_dim is None or self.family == "llama"):
            raise UserError(
                f"model: hidden_size {self.hidden_size} and {heads} attention heads",
                "the hidden size is a multiple of the number of heads",
                f"set num_attention_heads to one of {divisors(self.hidden_size)}",
            )
        theta, scaling = read_rope(
            self.rope_scaling, self.rope_parameters, self.rope_theta or self.default_theta, self.max_position_embeddings
        )
        window, window_layers = self.windows()
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
            rope_theta=theta,
            rope_scaling=scaling,
            qk_norm=self.qk_norm,
            window=window if window_layers else None,
            window_layers=window_layers if window else (),
            attn_dropout=self.attention_dropout,
            **self.extras(),
            **token_ids_of(self),
        )

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        assert arch.rope_theta is not None
        scaling = None if arch.rope_scaling is None else arch.rope_scaling.to_hf()
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
            "rope_theta": arch.rope_theta,  # this and rope_scaling are read by transformers 4
            "rope_scaling": scaling,
            "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": arch.rope_theta},  # by 5
            "attention_dropout": arch.attn_dropout,
        }


def check_window(family: type[RotaryFields], own: dict[str, Any], merged: dict[str, Any]) -> None:
    """Raises UserError where a recipe gives one of use_sliding_window and sliding_window an effect and the other not."""
    default = {name: family.model_fields[name].default for name in ("use_sliding_window", "sliding_window")}
    is_on, window = (merged.get(name, default[name]) for name in default)
    if own.get("use_sliding_window") and window is None:
        raise UserError(
            "model: use_sliding_window: true with sliding_window: null",
            "without its length there is no window, and every layer sees all tokens",
            "give model.sliding_window in tokens, or remove use_sliding_window",
        )
    if own.get("sliding_window") is not None and not is_on:
        raise UserError(
            f"model: sliding_window: {window} without use_sliding_window",
            f"{family.architecture_class} has a window only where use_sliding_window is true",
            "add model.use_sliding_window=true, or remove sliding_window",
        )


class WindowedFields(RotaryFields):
    """A window that `use_sliding_window` turns on, in the layers that `layer_types` names."""

    use_sliding_window: bool = False
    """Some layers see the last sliding_window tokens only."""
    sliding_window: Size | None = None
    """That many tokens, itself included; without effect unless use_sliding_window."""
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    """Kind of attention per block; follows from the family's rule when left out."""

    @classmethod
    def check_own(cls, own: dict[str, Any], merged: dict[str, Any]) -> None:
        check_window(cls, own, merged)

    @abstractmethod
    def windowed_by_rule(self) -> Iterable[int]:
        """The layers that have the window when layer_types is left out."""

    def windows(self) -> Windows:
        count, window = self.num_hidden_layers, self.sliding_window if self.use_sliding_window else None
        if self.layer_types is None:
            return window, tuple(self.windowed_by_rule()) if window else ()
        if len(self.layer_types) != count:
            raise UserError(
                f"model: {len(self.layer_types)} layer_types and num_hidden_layers {count}",
                "layer_types names the attention of every layer",
                f"give {count} of them, or model.layer_types=null to have them follow from the family's rule",
            )
        layers = tuple(layer for layer, kind in enumerate(self.layer_types) if kind == "sliding_attention")
        if layers and window is None:
            raise UserError(
                f"model: layer_types names sliding layers, with use_sliding_window {self.use_sliding_window} and"
                f" sliding_window {self.sliding_window}",
                "a sliding layer has a window",
                "set use_sliding_window and sliding_window, or model.layer_types=null",
            )
        return window, layers

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        fields = {**super().from_architecture(arch), "use_sliding_window": arch.window is not None}
        if arch.window is None:
            return fields
        kinds = ["sliding_attention" if i in arch.window_layers else "full_attention" for i in range(arch.num_layers)]
        return {**fields, "sliding_window": arch.window, "layer_types": kinds}
