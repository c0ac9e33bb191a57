"""The base of every room's config: frozen, strict, and documented beside the field.

A config is checked when it is made and never changes afterwards. Unknown keys are refused (`windlass.config` turns pydantic's
complaint into a sentence that names the nearest key). The docstring under a field states its unit and effect; docs/recipe.md
is generated from it.
"""

from pydantic import BaseModel, ConfigDict


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
