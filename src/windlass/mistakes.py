"""Every mistake of a recipe, in the recipe's order: keys and values, the rules of their section, then those between sections.

pydantic ends a section at its first wrong value before any rule is judged. So each section is validated by itself, and one that
has wrong values is made of its valid fields alone: a rule that reads another field is not judged (Settings.violations), and all
others are. No torch, no files.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final, TypeVar, cast

from pydantic import ValidationError

from windlass.errors import SeveralErrors, UserError, nearest
from windlass.other_names.answers import REMOVE
from windlass.other_names.renamed_keys import named_section, renamed_elsewhere, renamed_key_advice
from windlass.other_names.values import value_meant
from windlass.recipe import parse_yaml
from windlass.settings import BrokenRule, Gathering, Settings, Violations, as_yaml, meant

Location = tuple[int | str, ...]
Mistake = tuple[Location, UserError]
Recipe = TypeVar("Recipe", bound=Settings)
MAX_SHOWN: Final = 60  # characters of a value that is written out in an answer
SETTING: Final = re.compile(r"(?<![\w.])([a-z]+)\.([a-z_0-9]+)=")


def gather_mistakes(
    recipe: type[Recipe], tree: Mapping[str, Any], settled: Iterable[tuple[Sequence[str], UserError]]
) -> tuple[Recipe, list[Mistake]]:
    """The sections of `tree`, and what is wrong inside them: a `recipe` whose wrong fields are missing, and every mistake.
    `settled`: errors that are known, with the paths of their keys, on which pydantic's complaints are left out."""
    known = [
        (
            [tuple(path.split(".")) for path in paths],
            UserError(error.given, error.rule, accepted(recipe, error.change)),
        )
        for paths, error in settled
    ]
    rules: list[Mistake] = []
    sections: dict[str, Any] = {}
    complaints: list[Any] = [
        {"type": "extra_forbidden", "loc": (key,), "input": tree[key]} for key in tree if key not in recipe.model_fields
    ]
    for name, field in recipe.model_fields.items():
        section: Any = field.annotation
        valid = Gathering(section)
        if name not in tree:
            if field.is_required():
                complaints.append({"type": "missing", "loc": (name,)})
            sections[name] = _partly(section, valid, section.model_fields) if field.is_required() else field.default
            continue
        try:
            sections[name] = section.model_validate(tree[name], context=valid)
        except ValidationError as error:
            listed = error.errors()
            complaints += [{**item, "loc": (name, *item["loc"])} for item in listed]
            wrong = {str(item["loc"][0]) for item in listed if item["loc"]}
            sections[name] = _partly(section, valid, wrong if isinstance(tree[name], Mapping) else section.model_fields)
            if wrong:  # else its rules have been judged
                broken = sections[name].violations()
                rules += [((name,), one) for rule in broken for one in _as_user_errors(rule, (name,), tree[name])]
    found: list[Mistake] = [(locations[0], error) for locations, error in known]
    for location, mistake in _explain(recipe, tree, complaints):
        if not any(location[: len(taken)] == taken for locations, _ in known for taken in locations):
            found.append((location, mistake))
    return cast(Recipe, recipe.model_construct(**sections)), found + rules


def check_is_recipe(function: str, given: object) -> None:
    """Raises UserError where a function of the package is given something else than a recipe that was checked."""
    if not isinstance(given, Settings):
        loaded = f"load_recipe({str(given)!r})" if isinstance(given, str | PurePath) else 'load_recipe("recipe.yaml")'
        raise UserError(
            f"{function}({given!r:.80})",
            f"{function} takes a recipe that load_recipe or parse_recipe has checked",
            f"for example {function}({loaded})",
        )


def errors_in_order(tree: Mapping[str, Any], found: Iterable[Mistake]) -> list[UserError]:
    """The errors as their keys follow each other in `tree`; what is missing, and rules, after the keys of their section."""
    return [error for _, error in sorted(found, key=lambda mistake: _position(tree, mistake[0]))]


def _partly(section: type[Settings], valid: Mapping[str, Any], wrong: Iterable[str]) -> Settings:
    """`section` of its `valid` fields and the defaults of those that are not given; the `wrong` ones (names or aliases), and
    those without a value, are missing."""
    fields = section.model_fields
    missing = {name for name, field in fields.items() if not {name, field.alias}.isdisjoint(wrong)}
    made = section.model_construct(**{name: value for name, value in valid.items() if name not in missing})
    for name in missing:
        made.__dict__.pop(name, None)
    return made


def _explain(recipe: type[Settings], tree: Any, complaints: Sequence[Any]) -> Iterator[Mistake]:
    """pydantic's complaints as errors; those on the members of one union are one error."""
    kinds: dict[Location, list[Any]] = {}
    located = [(_location(tree, item), item) for item in complaints]
    for location, item in located:
        path = path_of(location)
        if item["type"] == "extra_forbidden":
            choices, where = _keys_at(recipe, location[:-1]), path_of(location[:-1]) or "the recipe"
            hint = accepted(recipe, _hint(recipe, location, item["input"], choices))
            yield (
                location,
                UserError(path, f"{where} has no key `{location[-1]}`", f"{hint}keys of {where}: {', '.join(choices)}"),
            )
        elif item["type"] == "missing":
            yield location, UserError(f"{path} is missing", f"{path} has no default", f"add {path} to the recipe")
        elif item["type"] == "value_error":
            for error in _as_user_errors(item["ctx"]["error"], location, item["input"]):
                is_model = location[0] == "model"  # with other tools' keys, which its family answers
                yield from ((location, one) for one in (_taken(recipe, error) if is_model else [error]))
        else:
            kinds.setdefault(location, []).append(item)
    for location, items in kinds.items():
        if any(other[: len(location)] == location != other for other, _ in located):
            continue  # the member of the union that is meant is wrong further in
        path, given = path_of(location), items[0]["input"]
        choices = [word for item in items for word in item.get("ctx", {}).get("expected", "").split("'")[1::2]]
        must = " or ".join(dict.fromkeys(map(meant, items)))
        declared = path_of(_declared(recipe, location))
        if (known := value_meant(declared, given)) is not None:
            yield location, UserError(f"{path}={_shown(given)}", f"{known.reason}; {path} must be {must}", known.change)
            continue
        hint = nearest(str(given), choices)
        yield location, UserError(f"{path}={_shown(given)}", f"{path} must be {must}", f"{hint}{more_of(declared)}")


def _hint(recipe: Any, location: Location, value: Any, choices: list[str]) -> str:
    """What may be meant by a key that its section does not have: another word for one of its keys, a key of another section, a
    word for one of those, or the nearest in spelling."""
    section, key = ".".join(part for part in location[:-1] if isinstance(part, str)), str(location[-1])
    ours = named_section(key) if isinstance(value, Mapping) and value and section in ("", "optim") else ""
    if ours:
        return f"{_hints_inside(recipe, ours, value)}; "
    if (hint := renamed_key_advice(section, key, value)) or len(location) > 2:
        return hint or nearest(key, choices)
    others = [f"`{name}.{key}`" for name in recipe.model_fields if key in _keys_at(recipe, (name,))]
    there = f"did you mean {' or '.join(others)}? " if others else ""
    return there or renamed_elsewhere(key, value) or nearest(key, choices)


def _hints_inside(recipe: Any, ours: str, given: Mapping[str, Any]) -> str:
    """What to write for each key of another tool's section, whose place here is `ours`; and for which of them nothing is known.
    The place itself is named where one of them is there."""
    found, unknown = list[str](), list[str]()
    for key, value in given.items():
        hint = _hint_inside(recipe, ours, str(key), value)
        is_useless = hint.startswith(REMOVE)
        found += [hint.replace(REMOVE, f"remove {key}:", 1) if is_useless else f"for {key} use {hint}"] if hint else []
        unknown += [] if hint else [str(key)]
    more = [f"no key is known for {', '.join(unknown)}"] if unknown else []
    said, section = "; ".join([*found, *more]), ours.partition(".")[0]
    is_there = unknown or any(f"{section}." in one for one in found)
    return f"use the section {section}: {said}" if is_there else said


def _hint_inside(recipe: Any, ours: str, key: str, value: Any) -> str:
    """The setting for one such key; '' where none is known."""
    shown = as_yaml(value) if len(as_yaml(value)) <= MAX_SHOWN else "..."
    if key in recipe.model_fields:
        return f"the section {key}"
    if key in _keys_at(recipe, tuple(ours.split("."))):
        return f"{'adapter.kind=lora ' if ours == 'adapter' and key != 'kind' else ''}{ours}.{key}={shown}"
    others = [name for name in recipe.model_fields if key in _keys_at(recipe, (name,))]
    hint = renamed_key_advice(ours, key, value) or renamed_key_advice("", key, value)
    if not hint and len(others) == 1:
        return f"{others[0]}.{key}={shown}"
    return (hint or renamed_elsewhere(key, value)).removeprefix("use ").removesuffix("; ")


def accepted(recipe: type[Settings], answer: str) -> str:
    """`answer` to another tool's name, with what a key must be in place of each `section.key=value` that the key does not take:
    what is answered is not refused at the next start. Fields of a model are its family's to judge."""
    parts, at = [], 0
    for found in SETTING.finditer(answer):
        section, key, end = found[1], found[2], _end_of_value(answer, found.end())
        model = recipe.model_fields[section].annotation if section in recipe.model_fields else None
        if found.start() < at or model is None or section == "model":
            continue
        value = answer[found.end() : end]
        must = _refused(model, key, f"{section}.{key}", value)
        if must is not None:
            if known := value_meant(f"{section}.{key}", value):
                must = f"{known.reason}; {must}"
            parts.append(f"{answer[at : found.start()]}{section}.{key} ({must})")
            at = end
    return "".join(parts) + answer[at:]


def _taken(recipe: type[Settings], error: UserError) -> Iterator[UserError]:
    """An error, or the several that it holds, with settings that are taken."""
    for one in error.errors if isinstance(error, SeveralErrors) else (error,):
        yield UserError(one.given, one.rule, accepted(recipe, one.change))


def _end_of_value(text: str, begin: int) -> int:
    """Where a value of YAML ends that begins there, in a sentence."""
    depth = 0
    for at in range(begin, len(text)):
        depth += (text[at] in "[{") - (text[at] in "]}")
        if depth <= 0 and (text[at].isspace() or text[at] == ";" or text[at : at + 2] == ", "):
            return at
    return len(text)


def _refused(section: Any, key: str, path: str, value: str) -> str | None:
    """What a key of `section` must be that does not take `value`; None where it takes it. Other keys are not judged."""
    general = f"its values: windlass keys {path}"
    try:
        given = parse_yaml(value, path)
    except UserError:
        return general
    try:
        section.model_validate({key: given})
    except UserError:  # a rule beside other keys
        return None
    except ValidationError as error:
        wrong = [item for item in error.errors() if item["loc"] and item["loc"][0] == key]
        if any(len(item["loc"]) > 2 or item["type"] == "value_error" for item in wrong):
            return general
        return "it must be " + " or ".join(dict.fromkeys(map(meant, wrong))) if wrong else None
    return None


def _as_user_errors(violation: Exception, location: Location, given: Any) -> Iterator[UserError]:
    path = path_of(location)
    for one in violation.found if isinstance(violation, Violations) else (violation,):
        if isinstance(one, UserError):
            yield one
        elif isinstance(one, BrokenRule):
            key = next(iter(one.given), "")
            # pydantic's location of a rule that a field judges by itself ends with the field
            is_field = location[-1] == key and not (isinstance(given, Mapping) and key in given)
            yield one.at(path_of(location[:-1]) if is_field else path)
        else:
            shown = path if isinstance(given, Mapping | list | Settings) else f"{path}={_shown(given)}"
            yield UserError(shown, str(one), more_of(path))


def _shown(given: Any) -> str:
    """A value as a recipe has it, text in quotes."""
    return as_yaml(given) if given is None or isinstance(given, bool) else repr(given)


def more_of(path: str) -> str:
    """Which command explains a key, to a reader without the docs."""
    key = re.sub(r"\[\d+\]", "", path)
    return f"`windlass keys {key}` explains the key"


def path_of(location: Location) -> str:
    """`optim.groups[0].names`, as all messages write it."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _declared(recipe: Any, location: Location) -> Location:
    """The part of `location` that the recipe's sections have: a name in a mapping that the user fills is not one."""
    while location and isinstance(location[-1], str) and location[-1] not in _keys_at(recipe, location[:-1]):
        location = location[:-1]
    return location


def _location(tree: Any, item: Mapping[str, Any]) -> Location:
    """Where a complaint is in `tree`, without the names that pydantic gives to the members of a union."""
    kept: list[int | str] = []
    for index, part in enumerate(item["loc"]):
        is_last = index == len(item["loc"]) - 1
        if (isinstance(tree, Mapping) and part in tree) or (isinstance(tree, list) and isinstance(part, int)):
            tree = tree[part]
            kept.append(part)
        elif is_last and item["type"] == "missing":
            kept.append(part)
    return tuple(kept)


def _position(tree: Any, location: Location) -> list[float]:
    indices: list[float] = []
    for part in location:
        keys = list(tree) if isinstance(tree, Mapping) else list(range(len(tree))) if isinstance(tree, list) else []
        indices.append(keys.index(part) if part in keys else math.inf)
        tree = tree[part] if part in keys else None
    return indices + [math.inf] * (10 - len(indices))


def _keys_at(model: Any, location: Location) -> list[str]:
    for part in location:
        field = next((f for n, f in model.model_fields.items() if part in (n, f.alias)), None) if model else None
        annotations = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else [model]
        model = next((a for a in annotations if isinstance(a, type) and issubclass(a, Settings)), None)
    return [field.alias or name for name, field in model.model_fields.items() if not field.exclude] if model else []
