"""Rotary positions stretched beyond the length of the first training: the numbers, and Hugging Face's two spellings. No torch.

transformers 5 writes `rope_parameters` (with rope_type and rope_theta inside), older versions `rope_scaling` beside
`rope_theta`. Three kinds are computed, in rope.py, as transformers does:

    linear   every frequency divided by the factor                      (kaiokendev 2023, arXiv 2306.15595)
    llama3   long wavelengths divided, short ones kept, a ramp between  (Llama 3.1, arXiv 2407.21783)
    yarn     the same with a ramp over channels, and cos and sin scaled (arXiv 2309.00071)

`dynamic` makes the frequencies a function of the sequence's length: refused, as are the others, by name.
"""

import copy
import json
import math
from dataclasses import dataclass
from typing import Any, Final

from windlass.errors import UserError, nearest

_REQUIRED: Final[dict[str, tuple[str, ...]]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_ORIGINAL: Final = "original_max_position_embeddings"  # max_position_embeddings when left out
_OPTIONAL: Final[dict[str, tuple[str, ...]]] = {
    "linear": (),
    "llama3": (_ORIGINAL,),
    "yarn": (_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}


@dataclass(frozen=True)
class RopeScaling:
    """One kind with its numbers; None: not given, so the kind's own default."""

    kind: str
    factor: float
    original_positions: int
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by; 1 but for yarn."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return _growth(self.factor, self.mscale) / _growth(self.factor, self.mscale_all_dim)
        return _growth(self.factor, 1.0)

    def ramp(self, head_dim: int, theta: float) -> tuple[float, float]:
        """yarn: the channel pairs between which a frequency goes from kept to divided."""

        def channel(rotations: float) -> float:  # where that many turns fill the original length
            turns = math.log(self.original_positions / (rotations * 2 * math.pi))
            return head_dim * turns / (2 * math.log(theta))

        low, high = channel(self.beta_fast or 32.0), channel(self.beta_slow or 1.0)
        if self.truncate is not False:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        return low, high + 0.001 if low == high else high

    def to_hf(self) -> dict[str, object]:
        """Hugging Face's dict without rope_theta, with what was given."""
        own = {"rope_type": self.kind, "factor": self.factor}
        if self.kind != "linear":
            own[_ORIGINAL] = self.original_positions
        names = [name for name in (*_REQUIRED[self.kind], *_OPTIONAL[self.kind]) if name not in ("factor", _ORIGINAL)]
        values = {name: vars(self)[name] for name in names}
        return {**own, **{name: value for name, value in values.items() if value is not None}}


Rope = tuple[float, RopeScaling | None]
"""Base and scaling."""


def _growth(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0


def merge_rope(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`base` overridden by `own`, where a recipe's spelling of the rope replaces the other spelling too.

    The base's rope_theta stays unless the recipe gives another.
    """
    base = dict(base)
    spellings = [name for name in ("rope_scaling", "rope_parameters") if isinstance(base.get(name), dict)]
    if "rope_scaling" in own or "rope_parameters" in own:
        for name in reversed(spellings):  # transformers reads rope_scaling first
            spelling = base.pop(name)
            base |= {beside: value for rope, _, beside, value in _inside(spelling) if rope is spelling}
            if "sliding_attention" in spelling and "rope_parameters" not in own:  # which rope_scaling says nothing of
                theta = (spelling.get("full_attention") or {}).get("rope_theta")
                full = {} if theta is None else {"rope_theta": theta}
                base[name] = {"full_attention": full, "sliding_attention": spelling["sliding_attention"]}
    else:
        for name in spellings:
            base[name] = copy.deepcopy(base[name])
            for rope, key, beside, _value in _inside(base[name]):
                if beside in own:
                    del rope[key]
    return {**base, **own}


def _inside(spelling: dict[str, Any]) -> list[tuple[dict[str, Any], str, str, Any]]:
    """Values inside a spelling that may be given beside it: the mapping that holds each, its key there, the field, the value."""
    found = []
    for rope, names in (
        (spelling, {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}),
        (spelling.get("full_attention"), {"rope_theta": "rope_theta"}),
        (spelling.get("sliding_attention"), {"rope_theta": "rope_local_base_freq"}),  # gemma3's
    ):
        if isinstance(rope, dict):
            found += [(rope, key, beside, rope[key]) for key, beside in names.items() if key in rope]
    return found


def read_layer_ropes(
    rope_scaling: dict[str, Any] | None,
    rope_parameters: dict[str, Any] | None,
    full_theta: float,
    window_theta: float,
    max_positions: int,
) -> tuple[Rope, Rope]:
    """The ropes of the layers without and with a window, as transformers 5 reads them: `rope_scaling` is about the first
    alone."""
    given = rope_parameters or {}
    others = [name for name in given if name not in ("full_attention", "sliding_attention")]
    if others:
        raise UserError(
            f"model: rope_parameters has {', '.join(map(str, others))}",
            "this family has two ropes: rope_parameters holds full_attention and sliding_attention, a mapping each",
            "write it so, or give rope_theta and rope_scaling beside it",
        )
    if rope_scaling and "rope_type" not in rope_scaling:
        raise UserError(
            f"model: rope_scaling {json.dumps(rope_scaling)} without rope_type",
            "transformers 5 would ignore it",
            "give rope_scaling.rope_type: linear, llama3 or yarn",
        )
    full, windowed = ({**(given.get(name) or {})} for name in ("full_attention", "sliding_attention"))
    full = {**full, **(rope_scaling or {})}
    if False in (full.get("truncate"), windowed.get("truncate")):
        raise UserError(
            "model: truncate is False in the rope of one kind of layers",
            "transformers reads it where all layers have one rope, and ignores it here",
            "remove it: the model that transformers builds rounds yarn's range to whole channels",
        )
    return read_rope(None, full, full_theta, max_positions), read_rope(None, windowed, window_theta, max_positions)


def read_rope(
    rope_scaling: dict[str, Any] | None,
    rope_parameters: dict[str, Any] | None,
    rope_theta: float,
    max_positions: int,
) -> Rope:
    """(base, scaling) of both spellings as transformers 5 reads them: rope_scaling before rope_parameters, and a
    rope_theta inside before the one beside. Raises UserError for what would be another model here."""
    field = "rope_scaling" if rope_scaling else "rope_parameters"
    given = dict(rope_scaling or rope_parameters or {})
    if rope_scaling and rope_parameters and _bare(rope_scaling) != _bare(rope_parameters):
        raise UserError(
            f"model: rope_scaling {json.dumps(rope_scaling)} and rope_parameters {json.dumps(rope_parameters)}",
            "they are two spellings of one thing; transformers 5 reads the first, older versions know no other",
            "keep one of them",
        )
    theta = given.pop("rope_theta", rope_theta)
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
        raise UserError(f"model: {field}.rope_theta is {theta!r}", "a base is above 0", "give a number")
    kind = given.pop("rope_type", given.get("type")) or "default"
    given.pop("type", None)
    if given.pop("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise UserError(
            f"model: {field}.partial_rotary_factor",
            "every channel of a head is rotated here",
            "take a model without it",
        )
    if kind == "default":
        _refuse_extra(field, kind, given, ())
        return float(theta), None
    return float(theta), _read_scaling(field, kind, given, float(theta), max_positions)


def _bare(spelling: dict[str, Any]) -> dict[str, Any]:
    """Without fields that may be elsewhere or under another name."""
    kind = spelling.get("rope_type", spelling.get("type", "default"))
    return {**{k: v for k, v in spelling.items() if k not in ("rope_theta", "type")}, "rope_type": kind}


def _refuse_extra(field: str, kind: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    for key, value in given.items():
        if key not in known:
            raise UserError(
                f"model: {field}.{key} is {value!r}",
                f"rope_type {kind} has the numbers: {', '.join(known) or 'none but rope_theta'}",
                f"{nearest(key, list(known))}remove it, or name the rope_type that it belongs to",
            )


def _read_scaling(field: str, kind: object, given: dict[str, Any], theta: float, max_positions: int) -> RopeScaling:
    if kind == "dynamic":
        raise UserError(
            f"model: {field}.rope_type is 'dynamic'",
            "its frequencies change with the length of each sequence beyond max_position_embeddings; up to there it is"
            " the unscaled model",
            f"for sequences of at most {max_positions} tokens set model.{field}={{rope_type: default}}",
        )
    if not isinstance(kind, str) or kind not in _REQUIRED:
        raise UserError(
            f"model: {field}.rope_type is {kind!r}",
            f"the kinds are default, {', '.join(_REQUIRED)}; with others the model would be another one",
            f"{nearest(str(kind), list(_REQUIRED))}take a model with one of these",
        )
    _refuse_extra(field, kind, given, (*_REQUIRED[kind], *_OPTIONAL[kind]))
    for name in _REQUIRED[kind]:
        if given.get(name) is None:
            raise UserError(f"model: {field} without {name}", f"rope_type {kind} needs it", f"add {field}.{name}")
    truncate = given.pop("truncate", True)
    if not isinstance(truncate, bool):
        raise UserError(f"model: {field}.truncate is {truncate!r}", "it is true or false", "remove it")
    numbers = {name: value for name, value in given.items() if value is not None}
    for name, value in numbers.items():
        least = 1.0 if name in ("factor", _ORIGINAL) else 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf or not value:
            raise UserError(
                f"model: {field}.{name} is {value!r}",
                f"it is a number {'of at least 1' if least else 'above 0'}",
                "give such a number",
            )
    low, high = numbers.get("low_freq_factor", 0.0), numbers.get("high_freq_factor", 1.0)
    if low >= high:
        raise UserError(
            f"model: {field}: low_freq_factor {low} and high_freq_factor {high}",
            "frequencies go from divided to kept as they rise, so the low one is below the high one",
            "swap them",
        )
    if kind == "yarn" and theta <= 1.0:
        raise UserError(f"model: {field}.rope_theta is {theta}", "yarn divides by the base's logarithm", "give above 1")
    original = numbers.pop(_ORIGINAL, max_positions)
    return RopeScaling(kind=kind, original_positions=original, truncate=None if truncate else False, **numbers)
