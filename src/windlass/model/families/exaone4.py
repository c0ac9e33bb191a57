"""exaone4's fields: norms after attention and MLP, and layers without positions beside layers with a window. No torch."""

from collections.abc import Iterable
from typing import Any, ClassVar

from pydantic import Field

from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.families.family import Size
from windlass.model.families.llama_like import LayerTypesFields, RotaryFields, Windows
from windlass.model.families.olmo import NORMS_AFTER


class Exaone4Fields(LayerTypesFields, RotaryFields):
    """`model_type: exaone4`: where some layers have a window, the others have no positions. Source: arXiv 2507.11407."""

    family: ClassVar[str] = "exaone4"
    qk_norm: ClassVar[bool] = True
    architecture_class: ClassVar[str] = "Exaone4ForCausalLM"
    stored_names: ClassVar[dict[str, str]] = NORMS_AFTER

    num_key_value_heads: Size = 32
    """Key and value heads; 32 when left out."""
    rms_norm_eps: float = Field(1e-5, ge=0.0)
    """Added to the mean square in RMSNorm."""
    sliding_window: Size | None = 4096
    """Tokens that a query of a sliding layer sees, itself included; null: no layer slides, and all have positions."""
    sliding_window_pattern: int | str | None = 4
    """Without layer_types: every Nth block has no window and no positions."""

    def extras(self) -> dict[str, Any]:
        kinds = range(self.num_hidden_layers)
        full = () if self.sliding_window is None else tuple(sorted(set(kinds) - set(self.windows()[1])))
        return {"norm_inputs": False, "norm_outputs": True, "unrotated_layers": full}

    def windows(self) -> Windows:
        every = self.sliding_window_pattern
        if self.layer_types is None and (self.sliding_window is None or not isinstance(every, int) or every < 1):
            raise UserError(
                f"model: exaone4 with sliding_window {self.sliding_window}, sliding_window_pattern {every!r} and no layer_types",
                "transformers finds the layers without a window from a number in sliding_window_pattern, or from layer_types",
                'give layer_types, a list of "full_attention" and "sliding_attention" with one for each layer',
            )
        return super().windows()

    def windowed_by_rule(self) -> Iterable[int]:
        assert isinstance(self.sliding_window_pattern, int)
        return [layer for layer in range(self.num_hidden_layers) if (layer + 1) % self.sliding_window_pattern]

    @classmethod
    def from_architecture(cls, arch: Architecture) -> dict[str, object]:
        fields = super().from_architecture(arch)
        return fields if arch.window or arch.unrotated_layers else {**fields, "sliding_window": None}
