"""The base of every room's config: frozen, strict, and documented beside the field.

A config is checked when it is made and never changes afterwards. Unknown keys are refused (`windlass.config` turns pydantic's
complaint into a sentence that names the nearest key). The docstring under a field states its unit and effect; docs/recipe.md
is generated from it.
"""

import typing
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Settings(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=False,
        use_attribute_docstrings=True,
        populate_by_name=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """pydantic takes True for 1, and YAML 1.1 reads `yes` and `on` as True."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and bool not in (annotation, *typing.get_args(annotation)):
            raise ValueError(f"a number or text is meant, and {value} is neither")
        return value

    def fields(self) -> dict[str, Any]:
        """Every field and extra key with its value; sections stay what they are."""
        return {name: getattr(self, name) for name in type(self).model_fields} | (self.model_extra or {})

    def changed(self, **updates: Any) -> Self:
        """A copy with `updates`, validated as a new config is. Raises UserError, or pydantic's ValidationError."""
        return type(self).model_validate(self.fields() | updates)
