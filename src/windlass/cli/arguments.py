"""What several commands take and do: arguments with their help, lines printed and read as they come."""

import contextlib
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from windlass.contract import has_agent
from windlass.errors import Interrupted, UserError
from windlass.launch.restarts import Restarts
from windlass.safe_text import say
from windlass.units import counted

if TYPE_CHECKING:  # it takes a second to load
    from windlass.config import RunConfig

DATA_FILES: Final = {".jsonl", ".ndjson", ".parquet", ".arrow", ".csv", ".tsv"}
RUN_FILE: Final = "events.jsonl"
MODEL_FILES: Final = (RUN_FILE, "checkpoints", "config.json", "adapter_config.json")
SHOWN_RUNS: Final = 4


def check_recipe_file(recipe: str) -> str:
    """The RECIPE of a command. Raises UserError for a file of data, and says what writes a recipe for it."""
    path = Path(recipe)
    if DATA_FILES.isdisjoint(path.suffixes) or not path.is_file():  # rows.jsonl.gz too
        return recipe
    raise UserError(
        f"{path} is a file of data",
        "RECIPE is a YAML file, and names its data in data.sources",
        f"windlass init --data {shlex.quote(recipe)} writes a recipe for it",
    )


def check_overrides(words: list[str] | None) -> list[str] | None:
    """The KEY=VALUE of a command. Raises UserError where the shell has split a value at its spaces."""
    for at, word in enumerate(words or ()):
        if "=" not in word or not _open_brackets(word):
            continue
        for end in range(at + 2, len(words or ()) + 1):
            whole = " ".join((words or ())[at:end])
            if not _open_brackets(whole):
                change = f"put it into quotes: {shlex.quote(whole)}"
                raise UserError(
                    f"{word} and {counted(end - at - 1, 'word')} after it",
                    "a shell splits KEY=VALUE at its spaces",
                    change,
                )
    return words


def _open_brackets(text: str) -> int:
    return sum(text.count(one) for one in "[{") - sum(text.count(one) for one in "]}")


Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A YAML file, or the name of a shipped recipe: demo, gpt2-124m, ...",
        callback=check_recipe_file,
    ),
]


def complete_override(ctx: typer.Context, incomplete: str) -> list[str]:
    """The keys of a recipe that go on from what was typed; behind a key's `=` the words that it takes."""
    types, before = _types_of_keys(), ["", "", *(ctx.params.get("overrides") or [])]
    key, equals, begun = incomplete.partition("=")
    given = key + equals
    if before[-1] == "=":  # bash splits words at `=`: `key = begun`
        key, equals, begun, given = before[-2], "=", incomplete, ""
    elif not incomplete and before[-1] in types:  # `key =`, whose `=` typer leaves out
        key, equals, given = before[-1], "=", ""
    if not equals:
        return [f"{name}=" for name in types if name.startswith(incomplete)]
    words = re.findall(r"`([\w.-]+)`", types.get(key, ""))  # as `windlass keys` has them
    return [f"{given}{word}" for word in words if word.startswith(begun)]


def complete_section(incomplete: str) -> list[str]:
    """The sections of a recipe that go on from what was typed, and behind a dot their keys."""
    keys = list(_types_of_keys())
    found = keys if "." in incomplete else dict.fromkeys(key.rpartition(".")[0] for key in keys)
    return [name for name in found if name.startswith(incomplete)]


def complete_sink(incomplete: str) -> list[str]:
    return [word for word in re.findall(r"`(\w+)`", _types_of_keys()["report.sinks"]) if word.startswith(incomplete)]


def _types_of_keys() -> dict[str, str]:
    from windlass.keys import sections

    return {f"{one.path}.{key.name}": key.type for one in sections() if not one.family for key in one.keys}


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings that replace the recipe's: run.steps=100",
        autocompletion=complete_override,
        callback=check_overrides,
    ),
]
PreparedData = Annotated[
    str, typer.Argument(metavar="RECIPE|DIRECTORY", help="A recipe whose data is prepared, or its data.directory.")
]


def check_run_argument(path: Path) -> Path:
    """The RUN of a command. Raises UserError for a recipe, and says which directory its run has; and for a folder of runs."""
    _check_is_one(path)
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return path
    from windlass.config import load_recipe

    directory = "what it calls run.directory"
    with contextlib.suppress(UserError):
        directory = str(load_recipe(path).run.directory)
    raise UserError(f"{path} is a recipe", "RUN is the directory that a run writes", f"name {directory}")


def _check_is_one(path: Path) -> None:
    if not path.is_dir() or any((path / name).exists() for name in MODEL_FILES):
        return
    with contextlib.suppress(PermissionError):
        runs = sorted(str(one.parent) for one in path.glob(f"*/{RUN_FILE}"))
        if runs:
            shown = ", ".join(runs[:SHOWN_RUNS]) + f", and {len(runs) - SHOWN_RUNS} more" * (len(runs) > SHOWN_RUNS)
            change = f"name one of {shown}; `windlass runs {shlex.quote(str(path))}` lists them"
            raise UserError(f"{path} is a folder of runs", "RUN is the directory that one run writes", change)


def check_run_arguments(paths: list[Path]) -> list[Path]:
    return [check_run_argument(path) for path in paths]


RunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.", callback=check_run_argument)]
SavedPath = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="A run directory, one of its checkpoints, a Hugging Face directory, or an adapter's (PEFT).",
        callback=check_run_argument,
    ),
]
Nproc = Annotated[str | None, typer.Option(help="Processes: a number, or auto. Default: all visible GPUs, else 1.")]
Step = Annotated[int | None, typer.Option(help="The checkpoint of this step. Default: the newest.")]
Base = Annotated[Path | None, typer.Option(help="Of an adapter: the directory of its base, where that has moved.")]
Rehash = Annotated[
    bool, typer.Option("--rehash", help="Hash all local files of the sources, not only those that look changed.")
]


def rehashing(is_asked: bool) -> list[str]:
    """`--rehash` as an override of the recipe."""
    return ["data.rehash=true"] if is_asked else []


def restarts_of(config: "RunConfig") -> Restarts:
    """What `launch` and `data` of a recipe say about starting its ranks again."""

    def batch_at(position: int) -> str:
        from windlass.commands.data_consumed import batch_before  # with numpy: needed after three failures

        return batch_before(config, position)

    return Restarts(config.launch.max_restarts, config.launch.stall_s, config.data.batch_timeout_s, batch_at)


@contextlib.contextmanager
def interruptions() -> Iterator[None]:
    """A signal before the first step ends the command with the code that says whether the run goes on: typer makes 130 of any.
    Where our launcher started this rank, it says so for all of them."""
    try:
        yield
    except Interrupted as error:
        if not has_agent():
            say(f"windlass: {error}", sys.stderr)
        raise typer.Exit(error.code) from None


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        say(line)


def lines_of_stdin() -> Iterator[str]:
    """The lines of stdin that say something, with a sign in front of them on a terminal."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def endpoint_of(text: str) -> str:
    """`--endpoint`: HOST:PORT. Raises UserError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or (":" in host.strip("[]") and host[0] != "["):
        raise UserError(
            f"--endpoint {text}",
            "--endpoint is HOST:PORT: one of the hosts, and a free port that the others reach; the same on all",
            f"for example --endpoint {host or text or 'node-1'}:29400",
        )
    return text
