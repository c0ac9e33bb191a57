"""Plants a bug in the running process: a text of the source is exchanged for another.

A patch is (file, text, instead): a text that is in the file exactly once, inside of a function. The file is compiled with
`instead` in its place, and the live function gets the new code. Whoever has imported the function runs it, and undoing it is
giving the old code back: no copy of the package, no new process, no import that could hide the bug.
"""

import ast
import contextlib
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import windlass

PACKAGE = Path(windlass.__file__).parent
ROOT = Path(__file__).parent.parent.parent
Patch = tuple[str, str, str]


def path_of(file: str) -> Path:
    """Of the package, or of the tests where the name says so."""
    return (ROOT if file.startswith("tests/") else PACKAGE) / file


@contextlib.contextmanager
def planted(patches: Sequence[Patch]) -> Iterator[None]:
    """The patches are in this process, while inside."""
    undo: list[tuple[FunctionType, CodeType]] = []
    try:
        for file in dict.fromkeys(patch[0] for patch in patches):
            for function, code in _changed(file, [patch for patch in patches if patch[0] == file]):
                undo.append((function, function.__code__))
                function.__code__ = code
        yield
    finally:
        for function, code in undo:
            function.__code__ = code


def _changed(file: str, patches: Sequence[Patch]) -> list[tuple[FunctionType, CodeType]]:
    """The live functions that the patches of one file change, each with its new code."""
    old = new = path_of(file).read_text()
    for _, text, instead in patches:
        assert old.count(text) == 1, f"{file} has this {old.count(text)} times: {text!r}"
        assert text != instead, f"{file}: this changes nothing: {text!r}"
        new = new.replace(text, instead)
    parts = path_of(file).relative_to(ROOT if file.startswith("tests/") else PACKAGE.parent).with_suffix("").parts
    module, codes = importlib.import_module(".".join(parts)), _codes(compile(new, path_of(file), "exec"))
    names = {
        _function_at(ast.parse(old), old[: old.index(text) + _margin(text)].count("\n") + 1) for _, text, _ in patches
    }
    return [(_live(module, name), codes[name]) for name in sorted(names)]


def _margin(text: str) -> int:
    return len(text) - len(text.lstrip())


def _function_at(node: ast.AST, line: int, prefix: str = "") -> str:
    """The qualified name of the outermost function around `line`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.lineno <= line <= (child.end_lineno or 0):
            name = prefix + child.name
            return name if isinstance(child, ast.FunctionDef) else _function_at(child, line, f"{name}.")
    raise AssertionError(f"line {line} is in no function")


def _codes(code: CodeType) -> dict[str, CodeType]:
    found = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= {inner.co_qualname: inner, **_codes(inner)}
    return found


def _live(module: ModuleType, name: str) -> FunctionType:
    """The function itself, below properties, static methods and decorators that wrap it."""
    found: object = module
    for part in name.split("."):
        found = vars(found)[part]
    while not (isinstance(found, FunctionType) and found.__code__.co_qualname == name):
        found = next(inner for key in ("__wrapped__", "__func__", "fget") if (inner := getattr(found, key, None)))
    return found


def run_planted(plantings: Sequence[Sequence[Patch]], function, *args) -> list:
    """On a rank -> a result per planting, each with its own patches and no others."""
    results = []
    for patches in plantings:
        with planted(patches):
            results.append(function(*args))
    return results


class Planting:
    """A pool of ranks, with the patches in each while it runs a case. With several plantings a case runs once for each, in one
    process group, and `run` gives the results of the `chosen` one; a case that was asked for before is not run again."""

    def __init__(self, ranks, *plantings: Sequence[Patch]):
        self._ranks, self._plantings, self.chosen = ranks, tuple(map(tuple, plantings)), 0
        self._results: dict[str, list] = {}

    def run(self, world, function, *args, **limits):
        case = f"{function} {args}"
        if len(self._plantings) == 1 or case not in self._results:
            self._results[case] = self._ranks.run(world, run_planted, self._plantings, function, *args, **limits)
        return [results[self.chosen] for results in self._results[case]]

    def close(self):
        self._ranks.close()
