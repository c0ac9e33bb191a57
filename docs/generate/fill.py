"""Fills the marked places of docs/techniques/*.md and of walkthrough, howto/finetune, howto/watch-a-run, flops, performance and
scale.md from the source and from counted results.

A place is an HTML comment, what was filled in, and `<!-- end -->`. Seven kinds:

    code: PATH SYMBOL [from "..."] [to "..."]       lines of a function, class, method or assignment, or of the file (SYMBOL: *)
    docstring: PATH [from "..."] [to "..."]         lines of the docstring that opens the file
    file: PATH                                      a file whole
    figure: PAGE/ROW/COLUMN                         one number of benchmarks/results/techniques.json, see COLUMNS
    table: PAGE[/ROW [as NAME]]; ... | COLUMN, ...  several rows of it
    speed: NAME                                     a table of speed.py
    scale: WHAT [LAYOUT] | FIELD, ...               the rows of benchmarks/results/scale.json of one kind, a line per world

`from` and `to` name the first and the last line by a piece of text in them. A text that is not there stops the build: a page
cannot show what the source no longer says. `make docs` fills, a test holds the pages up to date.
"""

import ast
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from speed import speed  # beside this file

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
RESULTS = ROOT / "benchmarks" / "results" / "techniques.json"
PLACE = re.compile(r"<!-- (code|docstring|file|figure|table|speed|scale): (.+?) -->(.*?)<!-- end -->", re.S)
RANGE = re.compile(r'^(.*?)(?: from "(.+?)")?(?: to "(.+?)")?$')
LANGUAGES = {".py": "python", ".yaml": "yaml"}

Row = Mapping[str, Any]


def pages() -> list[Path]:
    return [
        *sorted((DOCS / "techniques").glob("*.md")),
        *(
            DOCS / f"{name}.md"
            for name in ("walkthrough", "scale", "howto/finetune", "howto/watch-a-run", "flops", "performance")
        ),
    ]


def filled(page: Path) -> str:
    """The page's text with every place filled anew."""

    def fill(place: re.Match[str]) -> str:
        kind, argument, _ = place.groups()
        try:
            return f"<!-- {kind}: {argument} -->{KINDS[kind](argument, page)}<!-- end -->"
        except (KeyError, LookupError, ValueError) as error:
            raise ValueError(f"{page.name}: {kind}: {argument}: {error}") from error

    return PLACE.sub(fill, page.read_text("utf-8"))


# ---- source


def code(argument: str, page: Path) -> str:
    target, first, last = _ranged(argument)
    path, symbol = target.split()
    text = (ROOT / path).read_text("utf-8")
    lines = text.splitlines()
    if symbol != "*":
        node = _find(ast.parse(text), symbol.split("."))
        start = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
        lines = lines[start - 1 : node.end_lineno]
    return _link(path, page, symbol) + _fenced("python", _cut(lines, first, last))


def docstring(argument: str, page: Path) -> str:
    path, first, last = _ranged(argument)
    words = ast.get_docstring(ast.parse((ROOT / path).read_text("utf-8")))
    if words is None:
        raise ValueError("the file opens with no docstring")
    lines = words.splitlines()
    cut = _cut(lines, first, last)
    _check_ends(lines, cut)
    return _link(path, page) + _fenced("text", cut)


def _check_ends(lines: list[str], cut: list[str]) -> None:
    """Raises ValueError where the line behind a cut, indented deeper than its entries, goes on with the last of them."""
    behind = lines[lines.index(cut[-1]) + 1 :][:1]
    depth = min(len(line) - len(line.lstrip()) for line in cut if line.strip())
    if behind and behind[0].strip() and len(behind[0]) - len(behind[0].lstrip()) > depth:
        raise ValueError(f'the cut ends in the middle of an entry, before "{behind[0].strip()}"')


def file(argument: str, page: Path) -> str:
    path = Path(argument)
    return _link(argument, page) + _fenced(LANGUAGES[path.suffix], (ROOT / path).read_text().splitlines())


def _ranged(argument: str) -> tuple[str, str | None, str | None]:
    found = RANGE.match(argument)
    assert found is not None
    target, first, last = found.groups()
    return target, first, last


def _find(tree: ast.AST, names: list[str]) -> Any:
    """The definition or assignment of a dotted name."""
    for node in ast.iter_child_nodes(tree):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        own = [getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)]
        if names[0] in own:
            return node if len(names) == 1 else _find(node, names[1:])
    raise ValueError(f"no {names[0]} is defined there")


def _cut(lines: list[str], first: str | None, last: str | None) -> list[str]:
    """From the first line that holds `first` to the first after it that holds `last`."""
    start = 0 if first is None else _index(lines, first, 0)
    end = len(lines) - 1 if last is None else _index(lines, last, start)
    return lines[start : end + 1]


def _index(lines: list[str], words: str, start: int) -> int:
    found = [index for index in range(start, len(lines)) if words in lines[index]]
    if not found:
        raise ValueError(f'no line holds "{words}"')
    return found[0]


def _link(path: str, page: Path, symbol: str = "*") -> str:
    up = "../" * (len(page.relative_to(ROOT).parts) - 1)
    return f"\n[`{path}`]({up}{path})" + (f", `{symbol}`" if symbol != "*" else "") + ":\n\n"


def _fenced(language: str, lines: list[str]) -> str:
    body = textwrap.dedent("\n".join(lines)).strip("\n")
    return f"```{language}\n{body}\n```\n"


# ---- results


def results() -> dict[str, dict[str, Any]]:
    """Page -> row -> what benchmarks/techniques.py counted."""
    pages: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())["pages"]
    return pages


def figure(argument: str, _page: Path) -> str:
    page, row, column = argument.split("/")
    return COLUMNS[column][1](results()[page][row])


def table(argument: str, _page: Path) -> str:
    places, _, names = argument.partition(" | ")
    recipes = RESULTS.with_name("finetune.json")  # benchmarks/finetune.py
    counted = results() | {"finetune": json.loads(recipes.read_text())["recipes"]}
    chosen: dict[str, Row] = {}
    for place in places.split("; "):
        place, _, name = place.partition(" as ")
        page, _, row = place.partition("/")
        chosen |= {name or row: counted[page][row]} if row else counted[page]
    columns = [COLUMNS[name] for name in names.split(", ")]
    head = "| layout | " + " | ".join(title for title, _ in columns) + " |\n|---|" + "---:|" * len(columns)
    body = "\n".join(
        f"| {name} | " + " | ".join(show(row) for _, show in columns) + " |" for name, row in chosen.items()
    )
    return f"\n\n{head}\n{body}\n\n"


def scale(argument: str, _page: Path) -> str:
    what, _, names = argument.partition(" | ")
    wanted = dict(zip(("what", "layout"), what.split()))
    rows = [
        row for row in json.loads(RESULTS.with_name("scale.json").read_text())["rows"] if wanted.items() <= row.items()
    ]
    fields = names.split(", ")
    head = "| " + " | ".join(name.replace("_", " ") for name in fields) + " |\n|" + "---:|" * len(fields)
    body = "\n".join("| " + " | ".join(f"{row[name]:,}" for name in fields) + " |" for row in rows)
    return f"\n\n{head}\n{body}\n\n"


def _of_ranks(get: Callable[[Row], int]) -> Callable[[Row], str]:
    """One number where all ranks have the same, else one per rank."""

    def show(row: Row) -> str:
        numbers = [get(rank) for rank in row["per_rank"]]
        return " / ".join(f"{number:,}" for number in (numbers[:1] if len(set(numbers)) == 1 else numbers))

    return show


def _elements(row: Row) -> int:
    """Parameters of the model, of a row that stores them whole in fp32."""
    return int(row["per_rank"][0]["parameters"]) // 4


def _named(name: str) -> Callable[[Row], str]:
    return _of_ranks(lambda rank: rank[name])


def _calls(row: Row) -> str:
    sent = row["per_rank"][0]["sent"]
    return ", ".join(f"{kind} {sent[kind]['calls']}" for kind in sorted(sent)) or "none"


def idle_share(row: Row) -> float:
    """Of the ranks' time on the unit clock of a pipeline's log."""
    ranks = row["timeline"]
    end = max(action[4] for rank in ranks for action in rank)
    busy = sum(action[4] - action[3] for rank in ranks for action in rank)
    return float(1 - busy / (end * len(ranks)))


COLUMNS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "parameters": ("parameters", _named("parameters")),
    "gradients": ("gradients", _named("gradients")),
    "states": ("states", _named("states")),
    "gathered": ("gathered at once", _named("gathered")),
    "whole gradients": ("whole gradients", _named("whole_gradients")),
    "kept": ("kept for backward", _named("kept")),
    "flops": ("FLOPs of products", _named("flops")),
    "calls": ("calls (rank 0)", _calls),
    "sent": ("bytes sent", _of_ranks(lambda rank: sum(kind["ring"] for kind in rank["sent"].values()))),
    "loss": ("loss after 3 steps", lambda row: f"{row['losses'][-1]:.6f}"),
    "elements": ("P", lambda row: f"{_elements(row):,}"),
    "sixteen": ("16 P", lambda row: f"{16 * _elements(row):,}"),
    "idle": ("idle", lambda row: f"{idle_share(row):.1%}" if "timeline" in row else "-"),
}
KINDS: dict[str, Callable[[str, Path], str]] = {
    "code": code,
    "docstring": docstring,
    "file": file,
    "figure": figure,
    "table": table,
    "speed": speed,
    "scale": scale,
}
