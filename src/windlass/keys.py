"""What the keys of a recipe are: name, type, default and meaning, from the configs themselves. No torch.

`windlass keys` prints the sections, `windlass keys optim` a section, `windlass keys optim.beta1` a key, `windlass keys qwen3` the
fields of a family.
"""

import functools
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from windlass.config import RunConfig
from windlass.errors import UserError, nearest
from windlass.model.families.family_table import FAMILIES
from windlass.model.families.presets import PRESETS
from windlass.other_names.renamed_keys import renamed_elsewhere, renamed_key_advice
from windlass.settings import COUNTS, Settings

SECTION: Final = "a section `{}` at `{}`"
"""A key whose value is a section: its name, and where in a recipe it is."""
WIDTH: Final = 100


@dataclass(frozen=True)
class Key:
    """`name`: behind its section's. `type`, `default`, `meaning`: in words."""

    name: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Section:
    """`path`: as a recipe has it, `data.sources`. `family`: of a model's fields, else empty."""

    path: str
    about: str
    keys: tuple[Key, ...]
    family: str = ""


def sections() -> Iterator[Section]:
    """All of a recipe, in its order; a section's inner ones behind it, and the fields of families behind `model`."""
    for name, field in RunConfig.model_fields.items():
        model = model_of(field.annotation)
        assert model is not None, f"RunConfig.{name} is no section"
        yield _section(name, model)
        for inner, path in inner_sections().items():
            if path.startswith(f"{name}."):
                yield _section(path, inner)
        if name == "model":
            for family, fields in FAMILIES.items():
                yield _section(name, fields, family)


def _section(path: str, model: type[Any], family: str = "") -> Section:
    about = _words(model.__doc__) if model.__doc__ and model.__doc__ != model.__base__.__doc__ else ""
    found = (
        Key(_name(key, field), _type(field), _default(field), _words(field.description))
        for key, field in model.model_fields.items()
        if not field.exclude
    )
    return Section(path, about, tuple(found), family)


def describe_keys(path: str | None) -> list[str]:
    """The sections of a recipe; or the keys of one, or of a family; or one key. Raises UserError for a path that is none."""
    known = [section for section in sections() if not section.family or section.family == path]
    if path is None:
        width = max(len(section.path) for section in known)
        lines = [f"{section.path:{width}}  {', '.join(key.name for key in section.keys)}" for section in known]
        lines.append(f"{'families':{width}}  {', '.join(FAMILIES)}")
        return [one for line in lines for one in _wrapped(line, " " * (width + 2))]
    named = {f"{section.path}.{key.name}": (section, key) for section in known for key in section.keys}
    for section in known:
        if path == (section.family or section.path):
            own = _lines(*named[path]) if path in named else []  # a key that may be this section, or a plain value
            about = [*_wrapped(section.about, ""), ""] if section.about else []
            return own + about + [line for key in section.keys for line in _lines(section, key)]
    if path in named:
        return _lines(*named[path])
    if lines := [line for one in _of_families(path) for line in one]:
        return lines
    last = [name for name in named if name.rpartition(".")[2] == path]
    if last:
        return [line for name in last for line in _lines(*named[name])]
    where, _, key = path.rpartition(".")
    words = f"use the section {key}; " if key in RunConfig.model_fields else renamed_key_advice(where, key, "VALUE")
    words = words or renamed_elsewhere(key, "VALUE") or renamed_key_advice("", key, "VALUE")
    raise UserError(
        f"windlass keys {path}",
        "a recipe has no section, no key and no family of that name",
        (words or nearest(path, [*(section.path for section in known), *FAMILIES, *named]))
        + "`windlass keys` lists them all",
    )


def _of_families(path: str) -> Iterator[list[str]]:
    """A field of the model: families that mean the same by it together."""
    found: dict[tuple[str, ...], list[str]] = {}
    for section in sections():
        for key in section.keys if section.family else ():
            if path == f"{section.path}.{key.name}":
                found.setdefault(tuple(_lines(section, key)), []).append(section.family)
    for (first, *rest), families in found.items():
        yield [first, *_wrapped(f"Of {', '.join(families)}.", "    ", "    "), *rest]


def schema() -> dict[str, Any]:
    """A JSON Schema of recipes, by which an editor completes and checks keys; the fields of a family are keys of `model`, of
    another family's not. It has names, types and limits: rules between keys are checked when a recipe is loaded."""
    found = RunConfig.model_json_schema(by_alias=True)
    model = found["$defs"]["ModelConfig"]["properties"]
    del model["hub_cache"]  # filled in from `hub`
    model["preset"]["anyOf"][0] = {"enum": [*PRESETS]}
    model["family"]["anyOf"].insert(0, {"enum": [*FAMILIES]})  # besides any text, for the family of a script
    own, of_families = [*model], {name: family.model_json_schema()["properties"] for name, family in FAMILIES.items()}
    for fields in of_families.values():
        for name, field in fields.items():
            kinds = field.get("anyOf") or [
                {key: value for key, value in field.items() if key in ("type", "enum", "const")}
            ]
            known = model.setdefault(name, {"anyOf": [{"type": "null"}], "description": field.get("description", "")})
            known["anyOf"] += [kind for kind in kinds if kind not in known["anyOf"]]
    found["$defs"]["ModelConfig"]["allOf"] = [
        _only_where_family({"enum": [None]}, [], [*model]),
        *(_only_where_family({"const": name}, ["family"], [*own, *fields]) for name, fields in of_families.items()),
    ]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A windlass recipe", **found}


def _only_where_family(family: dict[str, Any], required: list[str], names: list[str]) -> dict[str, Any]:
    """That `model` has no other keys than `names`, where its family is this one; required []: or where none is given."""
    given = {"properties": {"family": family}, "required": required}
    return {"if": given, "then": {"propertyNames": {"enum": sorted({*names})}}}


def _lines(section: Section, key: Key) -> list[str]:
    default = "required" if key.default == "required" else f"default {key.default}"
    return [
        f"{section.path}.{key.name}: {key.type}; {default}".replace("`", ""),
        *_wrapped(key.meaning, "    ", "    "),
        "",
    ]


def _wrapped(text: str, indent: str, first: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


@functools.cache
def inner_sections() -> dict[type[Any], str]:
    """Configs inside a section's config -> the key where each is used first: SourceConfig is at `data.sources`."""
    found: dict[type[Any], str] = {}
    for name, field in RunConfig.model_fields.items():
        section = model_of(field.annotation)
        assert section is not None
        _add_inner(section, name, found)
    return found


def _add_inner(section: type[Any], path: str, found: dict[type[Any], str]) -> None:
    for key, inner in section.model_fields.items():
        model = model_of(inner.annotation)
        if model is not None and model not in found:
            found[model] = f"{path}.{_name(key, inner)}"
            _add_inner(model, found[model], found)


def model_of(annotation: Any) -> type[Any] | None:
    """The config inside an annotation such as list[SourceConfig] | None, or None."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation if issubclass(annotation, Settings) else None
    return next((model for part in get_args(annotation) if (model := model_of(part)) is not None), None)


def _name(key: str, field: FieldInfo) -> str:
    return field.alias or key


def _type(field: FieldInfo) -> str:
    limits = [_limit(item) for item in field.metadata]
    return ", ".join([_annotation(field.annotation), *filter(None, limits)])


def _annotation(annotation: Any) -> str:
    """A type in words: `int | None` with Annotated limits -> 'int, at least 1, or null'."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        items = [part for item in arguments[1:] for part in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return ", ".join([_annotation(arguments[0]), *filter(None, map(_limit, items))])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_annotation(part) for part in arguments if part is not type(None))
    if origin is list:
        return f"list of {_annotation(arguments[0])}"
    if origin is dict:
        return f"mapping of {_annotation(arguments[0])} to {_annotation(arguments[1])}"
    known = {int: "int", float: "number", str: "text", bool: "`true`, `false`", Path: "path", Any: "any"}
    if annotation in known:
        return known[annotation]
    path = inner_sections()[annotation]
    return SECTION.format(annotation.__name__.removesuffix("Config").lower(), path)


def _limit(item: Any) -> str:
    """An annotated-types limit in words; '' for what is no limit."""
    match item:
        case annotated_types.Ge(ge=limit):
            return f"at least {limit:,}"
        case annotated_types.Gt(gt=limit):
            return f"above {limit:,}"
        case annotated_types.Le(le=limit):
            return f"at most {limit:,}"
        case annotated_types.Lt(lt=limit):
            return f"below {limit:,}"
        case _ if item is COUNTS:
            return "such as `2000`, `2k` or `1.5B`"
        case annotated_types.MinLen(min_length=limit):
            return f"at least {limit} long"
        case _:
            return ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if isinstance(value, int | float | str | list | dict) else "its defaults"


def _words(text: str | None) -> str:
    return " ".join((text or "").split())
