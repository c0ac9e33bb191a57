"""What the families with rotary positions share: Llama's fields, the ways to name a sliding window, and ropes that turn a part of
a head or differ by layer. No torch."""

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, cast

from pydantic import Field

from windlass.errors import UserError
from windlass.model.architecture import Architecture, divisors
from windlass.model.families.family import NEVER, Activation, Family, Layers, Size, common_fields, token_ids_of
from windlass.model.families.rope_scaling import Rope, read_layer_ropes, read_rope

Windows = tuple[int | None, tuple[int, ...]]  # keys that a query sees, and the layers where that holds


class DecoderFields(Family):
    """Sizes, rotary positions, grouped heads. A family adds what it has besides, and says it in `extras`."""

    family: ClassVar[str]
    activation_field: ClassVar[str] = "hidden_act"
    epsilon_field: ClassVar[str] = "rms_norm_eps"
    needs_even_heads: ClassVar[bool] = False  # the hidden size is a multiple of the heads even where head_dim is given
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
    num_hidden_layers: Layers
    """Number of blocks."""
    num_attention_heads: Size
    """Query heads."""
    num_key_value_heads: Size | None = None
    """Key and value heads; as many as query heads when left out."""
    head_dim: Size | None = None
    """Channels per head; hidden_size / num_attention_heads when left out."""
    max_position_embeddings: Size = 2048
    """Longest sequence the model is meant for, in tokens; written to the export."""
    rope_theta: float | None = Field(None, gt=0.0)
    """Base of the rotary frequencies; the family's own when left out, in most 10000."""
    rope_scaling: dict[str, Any] | None = None
    """Rotary positions stretched, as transformers 4 writes it; rope_type is linear, llama3 or yarn."""
    rope_parameters: dict[str, Any] | None = None
    """Stretched positions as transformers 5 writes them, with rope_theta inside; rope_type may be default too."""
    tie_word_embeddings: bool = False
    """Embedding and head are one matrix."""

    def extras(self) -> dict[str, Any]:
        """Fields of the Architecture beyond the shared ones."""
        return {}

    def windows(self) -> Windows:
        return None, ()

    def ropes(self) -> tuple[Rope, Rope | None]:
        """(base, scaling) of the layers without a window; of those with one, where it is another."""
        theta = self.rope_theta or self.default_theta
        return read_rope(self.rope_scaling, self.rope_parameters, theta, self.max_position_embeddings), None

    def to_architecture(self, vocab_size: int) -> Architecture:
        heads = self.num_attention_heads
        if self.hidden_size % heads and (self.head_dim is None or self.needs_even_heads):
            raise UserError(
                f"model: hidden_size {self.hidden_size} and {heads} attention heads",
                "the hidden size is a multiple of the number of heads",
                f"set num_attention_heads to one of {divisors(self.hidden_size)}",
            )
        window, window_layers = self.windows()
        (theta, scaling), window_rope = self.ropes()
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
            activation=getattr(self, self.activation_field),
            norm_eps=getattr(self, self.epsilon_field),
            initializer_range=self.initializer_range,
            tied=self.tie_word_embeddings,
            rope_theta=theta,
            rope_scaling=scaling,
            window_rope=window_rope if window and window_layers and window_rope != (theta, scaling) else None,
            qk_norm=self.qk_norm,
            window=window if window_layers else None,
            window_layers=window_layers if window else (),
            attn_dropout=getattr(self, "attention_dropout", 0.0),
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
            cls.activation_field: arch.activation,
            "max_position_embeddings": arch.max_positions,
            cls.epsilon_field: arch.norm_eps,
            "rope_theta": arch.rope_theta,  # this and rope_scaling are read by transformers 4
            "rope_scaling": scaling,
            "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": arch.rope_theta},  # by 5
            **({"attention_dropout": arch.attn_dropout} if "attention_dropout" in cls.model_fields else {}),
        }


class RotaryFields(DecoderFields):
    """A decoder with RMSNorm and a gated MLP, as in Llama."""

    hidden_act: Activation = "silu"
    """Activation of the MLP."""
    rms_norm_eps: float = Field(1e-6, ge=0.0)
    """Added to the mean square in RMSNorm."""
    attention_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """In training, probability that an attention weight is dropped. Above 0 attention runs unfused: about 3 times its time."""


class PartialRotaryFields(RotaryFields):
    """A rope that turns the first channels of a head."""

    fixed: ClassVar[dict[str, tuple[Any, ...]]] = NEVER

    partial_rotary_factor: float | None = Field(1.0, gt=0.0, le=1.0)
    """Share of a head's channels that are rotated, the first ones; all when null."""

    def rotary_dim(self, head_dim: int) -> int | None:
        """Channels that are rotated; None: all."""
        inside = self.rope_scaling or self.rope_parameters or {}
        factor = inside.get("partial_rotary_factor", self.partial_rotary_factor)
        factor = 1.0 if factor is None else factor
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
            raise UserError(
                f"model: partial_rotary_factor is {factor!r}", "it is above 0 and at most 1", "give such a number"
            )
        rotated = int(head_dim * factor)
        return None if rotated == head_dim else rotated

    def ropes(self) -> tuple[Rope, Rope | None]:
        scaling, parameters = (
            None if one is None else {key: value for key, value in one.items() if key != "partial_rotary_factor"}
            for one in (self.rope_scaling, self.rope_parameters)
        )
        theta = self.rope_theta or self.default_theta
        return read_rope(scaling, parameters, theta, self.max_position_embeddings), None

    def extras(self) -> dict[str, Any]:
        return {"rotary_dim": self.rotary_dim(self.head_dim or self.hidden_size // self.num_attention_heads)}

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        factor = (arch.rotary_dim or arch.head_dim) / arch.head_dim
        if int(arch.head_dim * factor) < (arch.rotary_dim or arch.head_dim):  # rounded down
            factor = math.nextafter(factor, 1.0)
        fields = super().from_architecture(arch)
        rope = {**cast(dict[str, object], fields["rope_parameters"]), "partial_rotary_factor": factor}
        return {**fields, "rope_parameters": rope, "partial_rotary_factor": factor}


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


class LayerTypesFields(DecoderFields):
    """A window in the layers that `layer_types` names."""

    sliding_window: Size | None = 4096
    """Tokens that a query of a sliding layer sees, itself included."""
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    """Kind of attention per block; follows from the family's rule when left out."""

    @abstractmethod
    def windowed_by_rule(self) -> Iterable[int]:
        """The layers that have the window when layer_types is left out."""

    def window(self) -> int | None:
        """Keys that a query of a sliding layer sees."""
        return self.sliding_window

    def windows(self) -> Windows:
        count, window = self.num_hidden_layers, self.window()
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
                f"model: layer_types names sliding layers, with {self._window_fields()}",
                "a sliding layer has a window",
                "set sliding_window (and use_sliding_window where the family has it), or model.layer_types=null",
            )
        return window, layers

    def _window_fields(self) -> str:
        fields = [name for name in ("use_sliding_window", "sliding_window") if name in type(self).model_fields]
        return " and ".join(f"{name} {getattr(self, name)}" for name in fields)

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        kinds = ["sliding_attention" if i in arch.window_layers else "full_attention" for i in range(arch.num_layers)]
        window = cls.model_fields["sliding_window"].default if arch.window is None else arch.window
        return {**super().from_architecture(arch), "sliding_window": window, "layer_types": kinds}


class WindowedFields(LayerTypesFields, RotaryFields):
    """A window that `use_sliding_window` turns on, in the layers that `layer_types` names."""

    use_sliding_window: bool = False
    """Some layers see the last sliding_window tokens only."""
    sliding_window: Size | None = None
    """That many tokens, itself included; without effect unless use_sliding_window."""

    @classmethod
    def check_own(cls, own: dict[str, Any], merged: dict[str, Any]) -> None:
        check_window(cls, own, merged)

    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        fields = {**super().from_architecture(arch), "use_sliding_window": arch.window is not None}
        left_out = ("sliding_window", "layer_types") if arch.window is None else ()
        return {name: value for name, value in fields.items() if name not in left_out}


class LayeredRopeFields(LayerTypesFields):
    """A rope for the layers with a window, another for those without. transformers 5 writes both into `rope_parameters`, by the
    names in layer_types."""

    def window_theta(self) -> float:
        """Base of the layers with a window, where rope_parameters does not say it."""
        return self.default_theta

    def ropes(self) -> tuple[Rope, Rope | None]:
        thetas = self.rope_theta or self.default_theta, self.window_theta()
        return read_layer_ropes(self.rope_scaling, self.rope_parameters, *thetas, self.max_position_embeddings)

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        fields = super().from_architecture(arch)
        theta, scaling = arch.window_rope or (arch.rope_theta, arch.rope_scaling)
        window_rope = {**({"rope_type": "default"} if scaling is None else scaling.to_hf()), "rope_theta": theta}
        return {
            **fields,
            "rope_parameters": {"full_attention": fields["rope_parameters"], "sliding_attention": window_rope},
        }
