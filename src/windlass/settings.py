"""The base of every room's config: frozen, strict, and documented beside the field.

A config is checked when it is made and never changes afterwards. Unknown keys are refused (windlass.mistakes turns pydantic's
complaint into a sentence that names the nearest key). The docstring under a field states its unit and effect; docs/recipe.md
is generated from it.

Rules between the keys of a config are generators (`rules`), so that all violated ones can be listed. A config that is made
directly raises the first; a recipe lists them all (windlass.mistakes). A section that does not know where it is in a recipe, as
in a list of sources, breaks a BrokenRule, with keys of its own; any other raises a UserError.
"""

import json
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from windlass.errors import UserError
from windlass.safe_text import shown

MAX_SHOWN: Final = 200  # characters of a value in a message
OWN_KEY: Final = re.compile(r"(?<![^\s(`'])\.(?=[a-z])")


def as_yaml(value: Any) -> str:
    """A value as a recipe would have it; of a section what was given."""
    if isinstance(value, Settings):
        value = value.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_yaml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)  # on one line, whatever it holds
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f'"{text}"' if isinstance(value, str) and text.isdigit() else text  # a number in quotes is text


def cut(text: str) -> str:
    """The beginning of a text that is long."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def in_a_row(words: Iterable[str], last: str) -> str:
    """`a, b and c`."""
    *first, end = words
    return f"{', '.join(first)} {last} {end}" if first else end


class BrokenRule(ValueError):
    """A violated rule of a section that does not know where it is in a recipe. pydantic collects it, as a ValueError, and
    windlass.mistakes joins it with the path of the section.

    `given`: keys of the section, `order.lanes`, with their values, the wrong one first; None: the key is missing; the key "" is
    the section itself. `change` names a key with a dot before it, `.order.lanes`.
    """

    def __init__(self, given: Mapping[str, object], rule: str, change: str):
        super().__init__(given, rule, change)
        self.given, self.rule, self.change = given, rule, change

    def at(self, path: str) -> UserError:
        """The mistake, in the section at `path`."""
        keys = {".".join(filter(None, (path, key))): value for key, value in self.given.items()}
        # hidden before it is cut: a URL without its end does not show what of it is a password
        texts = {key: cut(shown(as_yaml(one))) or '""' for key, one in keys.items() if one is not None}
        has = [f"{key}={text}" if key else text for key, text in texts.items()]
        lacks = [key for key in keys if key not in texts]
        given = f"{has[0]} with {in_a_row(has[1:], 'and')}" if has[1:] else "".join(has) or path
        given += f" without {in_a_row(lacks, 'or')}" if lacks else ""
        return UserError(given.strip(), self.rule, OWN_KEY.sub(f"{path}." if path else "", self.change))

    def __str__(self) -> str:
        error = self.at("")
        return f"{error.given}: {error.rule}; {error.change}"


Violation = UserError | BrokenRule


V = TypeVar("V", bound=Violation)


class Violations(ValueError):
    """The violated rules of one config, on their way through pydantic, which collects ValueErrors and stops at others."""

    def __init__(self, found: Sequence[Violation]):
        super().__init__("; ".join(map(str, found)))
        self.found = tuple(found)


class Gathering(dict[str, Any]):
    """The context of a validation that lists every mistake: field -> value, of the valid fields of a `section`."""

    def __init__(self, section: type["Settings"]):
        super().__init__()
        self.section = section


SHORT: Final = r"^[0-9]+(\.[0-9]+)?[kKmMbBgGtT]$"
THOUSANDS: Final = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def read_count(value: object) -> object:
    """`1.5B` as the number that it is; what is no such text, or not a whole number, as it was given."""
    if not isinstance(value, str) or not re.fullmatch(SHORT, value.strip()):
        return value
    number = Decimal(value.strip()[:-1]) * THOUSANDS[value.strip()[-1].lower()]
    return int(number) if number == int(number) else value


@dataclass(frozen=True)
class Written:
    """Marks a text that is all `pattern`; `meant` says how it is written, as it follows "must be"."""

    pattern: str
    meant: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(core), "pattern": f"^{self.pattern}$"}

    def _check(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text):
            raise PydanticCustomError("written", "{meant}", {"meant": self.meant})
        return text


class _Counts:
    """Marks a field whose texts go through read_count."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(core), {"type": "string", "pattern": SHORT}]}


COUNTS: Final = _Counts()
Count = Annotated[int, COUNTS]
"""A number of things that is often large: `1k`, `300M`, `1.5B` and `2T` are read as the thousands that they mean."""


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
    def _read_number(cls, value: object, info: ValidationInfo) -> object:
        """pydantic takes True for 1, and YAML 1.1 reads `yes` and `on` as True."""
        assert info.field_name is not None
        field = cls.model_fields[info.field_name]
        annotation = field.annotation
        marks = [field.metadata, *(getattr(part, "__metadata__", ()) for part in typing.get_args(annotation))]
        if any(COUNTS in found for found in marks):
            value = [read_count(one) for one in value] if isinstance(value, list) else read_count(value)
        if isinstance(value, bool) and bool not in (annotation, *typing.get_args(annotation)):
            raise ValueError(f"a number or text is meant, and {as_yaml(value)} is neither")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _gather(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(info.context, Gathering) and info.context.section is cls:
            info.context[str(info.field_name)] = value
        return value

    @model_validator(mode="after")
    def _judge(self, info: ValidationInfo) -> Self:
        found = self.violations()
        if (first := next(found, None)) is not None:
            raise Violations([first, *found]) if isinstance(info.context, Gathering) else first
        return self

    def rules(self) -> Sequence[Iterator[Violation]]:
        """The rules between the keys; each yields its violations."""
        return ()

    def violations(self) -> Iterator[Violation]:
        """Every violated rule."""
        for rule in self.rules():
            yield from judged(rule)

    def exactly_one(self, what: str, *names: str) -> Iterator[BrokenRule]:
        """The rule that `what` has exactly one of these fields."""
        keys = {type(self).model_fields[name].alias or name: getattr(self, name) for name in names}
        given = {key: value for key, value in keys.items() if value is not None}
        if len(given) != 1:
            rule = f"{what} has exactly one of {in_a_row(keys, 'and')}"
            change = f"give one of them: {in_a_row((f'.{key}' for key in keys), 'or')}"
            yield BrokenRule(given or {"": self, **keys}, rule, change)

    def fields(self) -> dict[str, Any]:
        """Every field and extra key with its value; sections stay what they are."""
        return {name: getattr(self, name) for name in type(self).model_fields} | (self.model_extra or {})

    def or_default(self, name: str) -> Any:
        """A field's value; its default where the recipe's is wrong, and so is missing while rules are judged."""
        return getattr(self, name, type(self).model_fields[name].default)

    def known(self, name: str) -> Any:
        """A field's value; None where the recipe's is wrong, and so is missing while rules are judged. Raises KeyError for a name
        that is no field."""
        _ = type(self).model_fields[name]
        return getattr(self, name, None)

    def changed(self, **updates: Any) -> Self:
        """A copy with `updates`, validated as a new config is. Raises UserError, or pydantic's ValidationError."""
        return type(self).model_validate(self.fields() | updates)


def judged(rule: Iterator[V]) -> Iterator[V | UserError]:
    """The violations of `rule`, raised ones too. Where wrong fields of a config are missing, a rule ends when it reads one."""
    try:
        yield from rule
    except UserError as error:
        yield error
    except AttributeError as error:
        if not isinstance(error.obj, Settings) or error.name not in type(error.obj).model_fields:
            raise


_MEANT: Final = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "finite",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "path_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "greater_than": "greater than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
    "string_too_short": "text of at least {min_length} character",
    "too_short": "a list of at least {min_length}",
}


def meant(error: Mapping[str, Any]) -> str:
    """What one complaint of pydantic asks for, as it follows "must be"; for a kind that the table lacks, pydantic's words."""
    return _MEANT[error["type"]].format(**error.get("ctx", {})) if error["type"] in _MEANT else str(error["msg"])
