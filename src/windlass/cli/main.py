"""The command line: every command parses, then makes one call. Nothing heavy is imported before the call."""

import contextlib
import json
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer

from windlass import contract, signals
from windlass.cli import checkpoint as cli_checkpoint
from windlass.cli import data as cli_data
from windlass.cli import launch as cli_launch
from windlass.cli import models as cli_models
from windlass.cli import recipes as cli_recipes
from windlass.cli import runs as cli_runs
from windlass.cli.arguments import (
    Nproc,
    Overrides,
    Recipe,
    Rehash,
    endpoint_of,
    interruptions,
    rehashing,
    restarts_of,
)
from windlass.cli.group import Commands
from windlass.cli.run_lines import Event, printing, say_next
from windlass.errors import (
    EXIT_BUG,
    EXIT_NOT_EQUAL,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    UserError,
    WindlassError,
    exit_code_of,
)
from windlass.launch import local
from windlass.output import quiet_libraries
from windlass.safe_text import say
from windlass.units import counted
from windlass.version import __version__

if TYPE_CHECKING:  # it takes a second to load
    from windlass.config import RunConfig

app = typer.Typer(
    name="windlass",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
RANK_COMMANDS = ("train", "evaluate", "prepare", "doctor")  # those that a launcher may start once per rank


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"windlass {__version__}")
        raise typer.Exit


@app.callback()
def begin(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version, then leave.")
    ] = False,
) -> None:
    """Pretrain and finetune language models on one process or thousands, with proof."""
    command, world = context.invoked_subcommand, contract.num_ranks()
    if world > 1 and command not in RANK_COMMANDS:
        raise UserError(
            f"windlass {command} as one of {world} processes",
            f"a launcher starts one process per rank for {', '.join(RANK_COMMANDS)}; any other command is one process",
            f"run windlass {command} without the launcher",
        )
    if command not in ("train", "launch"):  # nothing to save: a signal ends the command
        found = signals.signals_of_process()
        context.with_resource(found.leaving() if found else contextlib.nullcontext())


app.add_typer(cli_checkpoint.app, name="checkpoint")
app.add_typer(cli_data.app, name="data")
app.add_typer(cli_launch.app, name="launch")


app.command()(cli_recipes.init)


@app.command()
def prepare(
    recipe: Recipe,
    overrides: Overrides = None,
    data_only: Annotated[bool, typer.Option("--data-only", help="Do not fetch the weights of model.from.")] = False,
    rehash: Rehash = False,
    tokenizer_only: Annotated[
        bool, typer.Option("--tokenizer-only", help="Hash and count the sources and make the tokenizer, for --part.")
    ] = False,
    part: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Encode part I, from 0, of N; `auto` asks the scheduler's variables."),
    ] = None,
    join: Annotated[bool, typer.Option("--join", help="Make the shards of the N parts, and delete these.")] = False,
) -> None:
    """Tokenise the recipe's data into shards, and fetch what it names of the hub. Skipped when nothing changed."""
    from windlass.config import load_recipe

    given = [
        name
        for name, is_given in {"--tokenizer-only": tokenizer_only, "--part": part is not None, "--join": join}.items()
        if is_given
    ]
    if len(given) > 1:
        change = "run them one after the other; `windlass prepare RECIPE` alone does it all on one machine"
        raise UserError(" with ".join(given), "each is a step of a preparation on several machines", change)
    config = load_recipe(recipe, *overrides or (), *rehashing(rehash))
    if tokenizer_only or part is not None:
        from windlass.commands.prepare_parts import prepare_numbered_part, prepare_pinned_tokenizer

        return prepare_pinned_tokenizer(config) if part is None else prepare_numbered_part(config, part)
    from windlass.training.preflight import prepare_only

    prepared = prepare_only(config, with_weights=not data_only, is_join=join)
    for name, info in prepared.sets.items():
        documents, samples = counted(info.documents, "document", ","), counted(info.samples, "sample", ",")
        print(f"{name}: {documents}, {info.tokens:,} tokens, {samples}")


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    nproc: Nproc = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Rehearse at full size in 5 steps, in a scratch directory.")
    ] = False,
    rehash: Rehash = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print incidents and errors alone.")] = False,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print the lines of events.jsonl; all else goes to stderr.")
    ] = False,
) -> None:
    """Train, or resume the run in its directory. Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP save, then exit with code 75."""
    from windlass.config import load_recipe

    local.check_nproc(nproc)
    config = load_recipe(recipe, *overrides or (), *rehashing(rehash))
    with interruptions():
        if smoke and (quiet or json_lines):
            raise UserError(
                f"--smoke with {'--quiet' if quiet else '--json'}",
                "a rehearsal exists for its output, and ends with its own figures",
                "leave one of them out",
            )
        if smoke and not local.is_worker():
            raise typer.Exit(_rehearse(config, recipe, overrides or [], nproc))
        with printing(quiet, json_lines) as on_event:
            if local.is_worker():
                raise typer.Exit(_train_as_worker(config, smoke, on_event))
            code = _train_here(config, local.choose_ranks(nproc), on_event)
            if code == EXIT_STOPPED:
                say(f"the same command goes on: windlass {shlex.join(sys.argv[1:])}")
            if code == 0 and not (quiet or json_lines):
                say_next(config)
            raise typer.Exit(code)


def _train_as_worker(config: "RunConfig", smoke: bool, on_event: Callable[[Event], None] | None) -> int:
    """One rank of a launcher's -> its exit code."""
    if smoke:
        raise UserError(
            "--smoke under a launcher (RANK is set)",
            "a rehearsal starts, kills and resumes its own ranks",
            "run it without the launcher: windlass train RECIPE --smoke --nproc N",
        )
    local.die_with_agent()
    from windlass.runtime import recorded
    from windlass.training.loop import train as run

    result = recorded(run)(config, on_event=on_event)
    return contract.exit_code_of_stop(result.signalled) if result.stopped else 0


def _rehearse(config: "RunConfig", recipe: str, overrides: list[str], nproc: str | None) -> int:
    from windlass.commands.smoke import rehearse
    from windlass.training.preflight import prepare_only

    # here, where it is known whether a run has begun with other data; the scratch run finds it done
    prepare_only(config)
    return rehearse(recipe, overrides, nproc, config.run.directory)


def _train_here(config: "RunConfig", num_ranks: int, on_event: Callable[[Event], None] | None) -> int:
    """On this machine -> the exit code of the run. With several ranks this process stays without torch: it refuses what a recipe
    alone says, and leaves the rest to rank 0."""
    if num_ranks == 1:
        from windlass.training.loop import train as run

        return EXIT_STOPPED if run(config, on_event=on_event).stopped else 0
    from windlass.training.interruptible import interruptible

    config.check_layout(config.model.shape(config.data.tokenizer.train), num_ranks, here=True)
    if crowd := local.shared_cores(num_ranks):
        say(crowd)
    with interruptible(config.run.directory):
        return local.launch_ranks(sys.argv[1:], num_ranks, config.run.directory, restarts_of(config))


@app.command()
def verify(
    recipe: Recipe,
    overrides: Overrides = None,
    nproc: Annotated[
        int | None, typer.Option(help="Processes of this machine at hand. Default: as many as it needs, up to 8.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the verdict there too.")
    ] = None,
) -> None:
    """Prove the recipe's layout equal to one process, on a tiny proxy model in fp64. Exit code 3 where a number differs."""
    from windlass.proof.verify import verify as prove

    if not prove(recipe, overrides or [], nproc, json_file):
        raise typer.Exit(EXIT_NOT_EQUAL)


for command in (
    cli_models.evaluate, cli_models.generate, cli_models.export,
    cli_runs.status, cli_runs.stacks, cli_runs.profile, cli_runs.advise, cli_runs.bench, cli_runs.runs, cli_runs.report,
    cli_runs.sync,
    cli_recipes.keys,
):  # fmt: skip
    app.command()(command)
app.command("import")(cli_recipes.import_file)


@app.command()
def doctor(
    recipe: Annotated[str | None, typer.Argument(metavar="[RECIPE]", help="Check it on this machine too.")] = None,
    overrides: Overrides = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks of this host. Default: one per GPU.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where the hosts of a run meet: check the network too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per finding, for scripts.")] = False,
) -> None:
    """Name what is wrong with this machine, and with a recipe on it. Exit code 2 where something is."""
    from windlass.commands.doctor import doctor as examine
    from windlass.commands.doctor import seen

    if contract.local_rank() != 0:  # one process of a host
        return
    if not as_json:
        say(seen())
    found = list(examine(recipe, overrides or [], endpoint and endpoint_of(endpoint), nproc))
    for one in found:
        say(json.dumps(one._asdict()) if as_json else one.text())
    if found:
        raise typer.Exit(EXIT_USER_ERROR)
    if not as_json:
        say("nothing wrong was found")


def _show_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A traceback, which may quote what the user gave."""
    say("".join(traceback.format_exception(kind, error, trace)).rstrip(), sys.stderr)


def main() -> None:
    """The entry point. Errors become exit codes here and nowhere else: see windlass.errors."""
    sys.excepthook = _show_crash
    quiet_libraries()
    local.let_threads_sleep()
    try:
        with signals.catch_signals():
            contract.adopt()
            app()
    except WindlassError as error:
        if error.code == EXIT_BUG:
            raise  # with its traceback
        if not error.elsewhere:
            local.show_error(error)
        raise SystemExit(error.code) from None
    except KeyboardInterrupt as error:
        raise SystemExit(exit_code_of(error)) from None


if __name__ == "__main__":  # `-m windlass.cli.main` would otherwise do nothing, and say so with 0
    main()
