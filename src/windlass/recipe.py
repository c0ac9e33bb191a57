"""How a recipe is read: YAML with the numbers people write, `section.key=value` overrides, and `${NAME}` for environment
variables. What it may hold: config.py.

PyYAML speaks YAML 1.1, where `3e-4` is a string and the second of two equal keys wins without a word. Here the first is a
number (as in YAML 1.2) and the second an error.
"""

import importlib.resources
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from windlass.errors import UserError, nearest, nearest_entry
from windlass.safe_text import HIDDEN, is_raw, keep_secret, redacted
from windlass.units import format_bytes

UNDER_WAY: Final = -1
MAX_DEPTH: Final = 30
MAX_VALUES: Final = 20_000  # mixtures of hundreds of sources have some thousands
MAX_BYTES: Final = 1 << 20
MAX_DIGITS: Final = 100  # characters of a number
MAX_QUOTED: Final = 300  # characters of an override in a message
VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
SCRIPTED: Final = re.compile(r"launch\.\w+\.(environment|setup)\b")
"""What scripts and manifests hold as it is, beside resolved.yaml, checkpoints and the report."""
UNQUOTED: Final = re.compile(r"[\s'\"<>`]")  # where safe_text takes a URL to end


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but `3e-4` is a number (YAML 1.2), and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():  # `!!map x`: refused below
            if key.value in seen:
                raise UserError(
                    f"the key `{key.value}` is given twice (line {key.start_mark.line + 1})",
                    "a key has one value",
                    "remove one of the two",
                )
            seen.append(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """A scalar by the form that it has, or by the tag that it carries (`!!float x`). PyYAML's own constructors raise whatever
        Python does."""
        kind = node.tag.rpartition(":")[2]
        if not isinstance(node, yaml.ScalarNode) or kind == "str":
            return super().construct_object(node, deep)
        where = f"{self.name}, line {node.start_mark.line + 1}"
        try:
            is_long = kind in ("int", "float") and len(node.value) > MAX_DIGITS
            value = 1 << 63 if is_long else super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError):
            raise UserError(
                f"{where}: {node.value[:MAX_DIGITS]!r} is no {kind}",
                f"YAML reads a value of this form, or with this tag, as a {kind}",
                "correct it, or put it into quotes where it is a text",
            ) from None
        if is_long or (type(value) is int and abs(value) >= 1 << 63):
            raise UserError(
                f"{where}: a number of {len(node.value)} characters, {node.value[:12]}...",
                "a whole number fits into 64 bits",
                "shorten it, or put it into quotes where it is a text",
            )
        return value


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


YAML_RULES: Final = (
    ("'\\t'", "YAML indents with spaces", "replace the tabs of that line by spaces"),
    ("alias", "a bare * begins an alias in YAML", 'put a pattern into quotes, such as ["*norm*"]'),
    ("mapping values are not", "the keys of a section begin in one column, and a text with `: ` in it is in quotes",
     "indent the line as those beside it, put its text into quotes, or write `key: value` on the line before it"),
    ("found '}'", "a bracket closes one that was opened", "remove the bracket, or open it"),
    ("found ']'", "a bracket closes one that was opened", "remove the bracket, or open it"),
    ("'<scalar>'", "a quote within a text in the same quotes is written twice", "write it twice, or use the other kind of quote"),
    ("a single document", "a recipe is one YAML document", "remove the line of ---"),
    ("expected ':'", "a key ends with a colon and a space", "write `key: value` on that line, or on the one before it"),
    ("a quoted scalar", "a quote that opens a text closes it", "close the quote"),
    ("expected ','", "values in {} and [] have commas between them, and the bracket is closed", "add the comma or the bracket"),
    ("<block end>", "the keys of a section, and the - of a list, begin in one column", "indent the line as those beside it"),
    ("cannot start any token", "a text that begins with %, @ or ` is in quotes", "put it into quotes"),
    ("", "a recipe is lines of `key: value`, with the keys of a section indented by spaces", "correct the line"),
)  # fmt: skip
"""Words of PyYAML's complaint, the rule, what to change; the first that is found counts."""


def parse_yaml(text: str, name: str) -> Any:
    """What `text` holds. `name`: what it is called in the UserError for what is not YAML, or far larger than a recipe is."""
    _check_kind(text, str, name, "parse_recipe(yaml.safe_dump(...)) takes a mapping; load_recipe(FILE) reads a file")
    try:
        _check_size(text, name)
        loader = _Loader(text)
        loader.name = name
        return loader.get_single_data()
    except yaml.YAMLError as error:
        problem = _problem(error)
        rule, change = next(answer for words, *answer in YAML_RULES if words in problem)
        raise UserError(f"{name} is not YAML: {problem}", rule, change) from None
    except (ValueError, OverflowError):  # the scanner's own: chr(0x110000), int() of 5,000 digits in %YAML 1.9...
        rule = "\\U00000000 to \\U0010FFFF are characters, and %YAML 1.1 is a version"
        raise UserError(f"{name} holds an escape or a directive that YAML has not", rule, "correct it") from None


def _check_kind(given: object, kind: Any, name: str, change: str) -> None:
    """Raises UserError for what a script gives in place of a text or a path."""
    if not isinstance(given, kind):
        raise UserError(f"{name} is given as {type(given).__name__}", "a recipe is YAML, as text or in a file", change)


def _problem(error: yaml.YAMLError) -> str:
    """PyYAML's complaint with line and column, without the excerpt that it prints: that may begin inside a URL, behind which a
    secret would not be recognised."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    marks = [mark for mark in (error.problem_mark, error.context_mark) if mark is not None]
    where = f" (line {marks[0].line + 1}, column {marks[0].column + 1})" if marks else ""
    return ", ".join(filter(None, (error.context, error.problem))) + where


def _check_size(text: str, name: str) -> None:
    """Raises UserError before anything of `text` is built that is deeper or larger than MAX_DEPTH and MAX_VALUES: nine aliases,
    each of nine aliases, nine times over, are 200 bytes of YAML and 400 million values."""
    _check_bytes(len(text), name)
    depth = num = 0
    for event in yaml.parse(text, yaml.SafeLoader):  # flat: neither the scanner nor the parser calls itself
        num += isinstance(event, yaml.NodeEvent)
        if num > MAX_VALUES:
            raise _too_many(name, f"more than {MAX_VALUES:,} values")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            line = event.start_mark.line + 1 if event.start_mark else 0
            raise UserError(
                f"{name}, line {line}: values nested more than {MAX_DEPTH} deep",
                "a recipe is sections of keys",
                "remove the nesting",
            )
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        """Values of a node with its aliases written out."""
        if sizes.get(id(node)) == UNDER_WAY:
            raise UserError(
                f"{name}: a value that holds itself, by an alias", "a recipe is finite", "write out what is meant"
            )
        if id(node) not in sizes:
            sizes[id(node)] = UNDER_WAY
            parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
            sizes[id(node)] = 1 + (sum(map(size, parts)) if isinstance(node, yaml.CollectionNode) else 0)
        return sizes[id(node)]

    node = yaml.compose(text, yaml.SafeLoader)
    if node is not None and (num := size(node)) > MAX_VALUES:
        raise _too_many(name, f"{num:,} values, aliases (*name) and merges (<<) written out")


def _too_many(name: str, held: str) -> UserError:
    return UserError(
        f"{name} holds {held}",
        f"a recipe holds at most {MAX_VALUES:,}, its keys among them",
        "write out what is meant, without aliases; a list of many files is a pattern or a folder in data.sources",
    )


def _check_bytes(size: int, name: str) -> None:
    """Raises UserError before a text is parsed, or read, that is far larger than a recipe."""
    if size > MAX_BYTES:
        raise UserError(
            f"{name} is {format_bytes(size)} long",
            f"a recipe is YAML of at most {format_bytes(MAX_BYTES)}",
            "give the recipe; data go into data.sources",
        )


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Sets `a.b=value` in the nested `tree`, in place; sections that are not there are made. Raises UserError."""
    path, equals, value = override.partition("=")
    keys = path.replace("[", ".").replace("]", "").split(".")  # sources[0] as messages name it
    named = f"the override `{override[:MAX_QUOTED]}{'...' * (len(override) > MAX_QUOTED)}`"
    if not equals or not all(keys):
        raise UserError(named, "overrides have the form section.key=value", "for example run.steps=100")
    for number, key in enumerate(keys[:-1], 1):
        if tree.get(key) is None:  # not there, or a section without keys
            tree[key] = {}
        tree = tree[key]
        if isinstance(tree, list):
            entry = f"{{{keys[-1]}: ...}}" if len(keys) > number + 1 else "..."
            change = f"give the whole list: '{'.'.join(keys[:number])}=[{entry}]'"
            raise UserError(named, f"`{key}` is a list, and an override replaces all of it", change)
        if not isinstance(tree, dict):
            raise UserError(named, f"`{key}` holds a value, not a section", "shorten the path")
    tree[keys[-1]] = parse_yaml(value, named)


def with_environment(value: Any, where: str = "", environ: Mapping[str, str] = os.environ) -> Any:
    """`value` with every `${NAME}` in its texts replaced by that environment variable. Raises UserError for one that is not set,
    and for a URL whose secret has no clear end."""
    if isinstance(value, Mapping):
        return {key: with_environment(item, f"{where}.{key}".lstrip("."), environ) for key, item in value.items()}
    if isinstance(value, list):
        return [with_environment(item, f"{where}[{number}]", environ) for number, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    _check_text(value, where)
    if SCRIPTED.match(where) and (named := VARIABLE.search(value)):
        raise UserError(
            f"{where} names the environment variable {named[1]}",
            "its value, which may be a secret, would be in the script that is submitted and in the files of the run",
            f"let the host expand it where shell lines are meant: ${named[1]}. SLURM's jobs inherit the environment of the shell "
            "that submits; launch.kubernetes.secrets and launch.sky.secrets give a variable without its value",
        )

    def variable(found: re.Match[str]) -> str:
        if found[1] in environ:
            # data.directory is opened again from a checkpoint's settings, which hold no secret
            if "://" in value[: found.start()] and where != "data.directory":
                keep_secret(environ[found[1]])
            return environ[found[1]]
        raise UserError(
            f"{where} names the environment variable {found[1]}, which is not set",
            "${NAME} in a recipe is an environment variable, on every host that reads the recipe",
            f"export {found[1]}, or write its value into the recipe",
        )

    text = VARIABLE.sub(variable, value)
    if UNQUOTED.search(text) and (redacted(text) != text or re.match(r"[a-z][\w+.-]*://[^/]*@", text, re.IGNORECASE)):
        raise UserError(
            f"{where} is a URL that holds white space, a quote, a backquote or an angle bracket",
            "a URL has none of these, so that messages can leave out its user, password and query",
            "write them percent-encoded: %20 for a space",
        )
    if is_raw(text):
        raise UserError(
            f"{where} is a URL whose user or password holds @, /, ? or #",
            "these characters end a part of a URL, so windlass cannot find where the host begins",
            "write them percent-encoded: %40 for @, %2F for /, %3F for ?, %23 for #",
        )
    return text


def _check_text(value: str, where: str) -> None:
    """Raises UserError for what no path and no file of text can hold."""
    wrong = "\0" if "\0" in value else next((letter for letter in value if "\ud800" <= letter <= "\udfff"), None)
    if wrong is not None:
        raise UserError(
            f"{where} holds the character {wrong!a}, at {value.index(wrong)}",
            "a text has neither NUL nor half of a surrogate pair: no path, and no file in UTF-8, can hold one",
            "remove it",
        )


def shipped_recipes() -> dict[str, Path]:
    """name -> file, of the recipes that come with windlass (in the wheel, or beside src/ in a checkout)."""
    inside = Path(str(importlib.resources.files("windlass"))) / "recipes"
    folder = inside if inside.is_dir() else Path(__file__).parents[2] / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def recipe_text(path: str | Path) -> tuple[str, str]:
    """The text of the recipe at `path`, or of the one that ships by that name; and what errors call it. Raises UserError."""
    _check_kind(path, str | Path, "the recipe", "load_recipe(FILE); parse_recipe(yaml.safe_dump(...)) takes a mapping")
    file = Path(path)
    if file.is_file():
        _check_bytes(file.stat().st_size, str(file))
        try:
            return file.read_text("utf-8"), str(file)
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is no text: {error}", "a recipe is YAML in UTF-8", "save it as UTF-8") from None
    shipped = shipped_recipes()
    if str(path) in shipped:
        return shipped[str(path)].read_text("utf-8"), str(path)
    rule = "a recipe is a YAML file, or the name of one that ships with windlass"
    if file.is_dir():
        raise UserError(f"{file} is a directory", rule, _instead_of(file))
    beside = [other.name for other in _recipes_in(file.parent) if nearest(file.stem, [other.stem])]
    guess = nearest_entry(file, beside) or nearest(file.stem, list(shipped))
    raise UserError(f"no recipe at {file}", rule, f"{guess}`windlass init` writes one; shipped: {', '.join(shipped)}")


def _recipes_in(folder: Path) -> list[Path]:
    return sorted(path for end in ("yaml", "yml") for path in folder.glob(f"*.{end}"))


def _instead_of(directory: Path) -> str:
    """Which recipe is meant by a directory: of a run the settings that it goes on with."""
    settings, held = directory / "resolved.yaml", ", ".join(map(str, _recipes_in(directory)))
    if settings.is_file() and HIDDEN in settings.read_text("utf-8", errors="replace"):
        return "to go on with the run in it, give the recipe that it began with: its own copy hides secrets of URLs"
    if settings.is_file():
        return f"to go on with the run in it: windlass train {settings}"
    return f"give one of {held}" if held else "give the recipe's file"
