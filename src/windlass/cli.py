"""The command line: every command parses, then makes one call. Nothing heavy is imported before the call."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from windlass.errors import EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USER_ERROR, UserError

app = typer.Typer(
    name="windlass",
    help="Pretrain language models on one process or thousands, with proof.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
checkpoint_app = typer.Typer(help="List, verify, compare and prune the checkpoints of a run.", no_args_is_help=True)
app.add_typer(checkpoint_app, name="checkpoint")

Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe: demo, gpt2-124m, ...")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that replace the recipe's: run.steps=100")
]
RunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")]
SavedPath = Annotated[
    Path, typer.Argument(metavar="PATH", help="A run directory, one of its checkpoints, or a Hugging Face directory.")
]
Nproc = Annotated[str | None, typer.Option(help="Processes: a number, or auto. Default: all visible GPUs, else 1.")]
Step = Annotated[int | None, typer.Option(help="The checkpoint of this step. Default: the newest.")]


@app.command()
def prepare(recipe: Recipe, overrides: Overrides = None) -> None:
    """Tokenise the recipe's data into shards. Skipped when nothing changed."""
    from windlass.config import load_recipe
    from windlass.data.prepare import prepare as prepare_data

    config = load_recipe(recipe, *overrides or ())
    prepared = prepare_data(config.data, config.evaluate.sets)
    for name, info in prepared.sets.items():
        print(f"{name}: {info.documents:,} documents, {info.tokens:,} tokens, {info.samples:,} samples")


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    nproc: Nproc = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Rehearse at full size in 5 steps, in a scratch directory.")
    ] = False,
) -> None:
    """Train, or resume what stands in the run directory. Ctrl-C and SIGTERM save, then leave with exit code 75."""
    from windlass.config import load_recipe
    from windlass.launch import local

    config = load_recipe(recipe, *overrides or ())
    if local.is_worker():
        local.die_with_agent()
        from windlass.jobs.train import train as run

        result = run(config, is_prepared=local.has_agent())
        raise typer.Exit(EXIT_STOPPED if result.stopped and not local.is_elastic() else 0)
    if smoke:
        from windlass.jobs.rehearse import rehearse

        raise typer.Exit(rehearse(recipe, overrides or [], nproc, config.run.directory))
    num_ranks = local.choose_ranks(nproc)
    from windlass.jobs.ready import make_ready

    make_ready(config, num_ranks, "cuda" if local.count_gpus() else "cpu")  # refused here, before ranks start
    if num_ranks > 1:
        code = local.launch(sys.argv[1:], num_ranks, config.run.directory)
        raise typer.Exit(EXIT_STOPPED if code == 0 and local.was_stopped(config.run.directory) else code)
    from windlass.jobs.train import train as run

    raise typer.Exit(EXIT_STOPPED if run(config, is_prepared=True).stopped else 0)


@app.command()
def evaluate(
    run: RunDirectory,
    step: Step = None,
    sequences: Annotated[int | None, typer.Option(help="Sequences per set, instead of the recipe's number.")] = None,
    nproc: Nproc = None,
) -> None:
    """Validation loss, perplexity and bits per byte of a checkpoint."""
    from windlass.launch import local

    local.die_with_agent()
    num_ranks = 1 if local.is_worker() else local.choose_ranks(nproc)
    if num_ranks > 1:
        raise typer.Exit(local.launch(sys.argv[1:], num_ranks, run))
    from windlass.jobs.evaluate import evaluate as score

    _print(score(run, step=step, sequences=sequences))


@app.command()
def generate(
    path: SavedPath,
    prompt: Annotated[
        list[str] | None, typer.Option(help="What the text begins with; may be given several times.")
    ] = None,
    step: Annotated[
        list[int] | None, typer.Option(help="Checkpoints to write from; several show how a run learned.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest continuation, in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.6,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest tokens that hold this probability.")] = 0.95,
    seed: Annotated[int, typer.Option(help="The same seed draws the same text.")] = 0,
    record: Annotated[bool, typer.Option("--record", help="Write the samples into the run's report, too.")] = False,
) -> None:
    """Text from a checkpoint or an exported directory."""
    from windlass.jobs.generate import generate as write

    prompts = prompt or [""]
    steps: list[int | None] = [*step] if step else [None]
    for at in steps:
        texts = write(
            path,
            prompts,
            step=at,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            record=record,
        )
        for given, text in zip(prompts, texts):
            print(f"--- step {at}" if at is not None else "---", given + text, sep="\n", flush=True)


@app.command()
def export(
    path: SavedPath,
    target: Annotated[
        Path | None, typer.Argument(metavar="TARGET", help="Where to. Default: export/ in the run directory.")
    ] = None,
    step: Step = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
) -> None:
    """A Hugging Face directory, loaded back by transformers and compared before it is there."""
    from windlass.jobs.export import export as write

    done = write(path, target, step=step, dtype=dtype)
    print(f"{done.directory}: loads in transformers, logits within {done.largest_difference:.1e} ({dtype})")


@app.command()
def report(run: RunDirectory) -> None:
    """Write report.html: one page, works offline."""
    from windlass.report.page.write import write_report

    print(write_report(run))


@checkpoint_app.command("list")
def checkpoint_list(
    run: RunDirectory,
    verify: Annotated[bool, typer.Option("--verify", help="Read and check every byte.")] = False,
) -> None:
    """The checkpoints of a run: step, time, size, validation loss."""
    from windlass.jobs.checkpoints import table

    _print(table(run, verify))


@checkpoint_app.command("verify")
def checkpoint_verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A run directory or one checkpoint directory.")],
) -> None:
    """Check every byte against the manifest. Exit code 2 and the file's name where something differs."""
    from windlass.jobs.checkpoints import check

    _print(check(path))


@checkpoint_app.command("diff")
def checkpoint_diff(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="A checkpoint directory.")],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="Another one.")],
) -> None:
    """Which tensors of two checkpoints differ."""
    from windlass.jobs.checkpoints import compare

    _print(compare(first, second))


@checkpoint_app.command("prune")
def checkpoint_prune(
    run: RunDirectory,
    keep_last: Annotated[int, typer.Option(help="Keep the newest so many.")] = 1,
    keep_best: Annotated[int, typer.Option(help="And the so many with the lowest validation loss.")] = 0,
) -> None:
    """Delete older checkpoints. The newest whole one always stays."""
    from windlass.jobs.checkpoints import delete

    print(delete(run, keep_last, keep_best))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def main() -> None:
    """The entry point: a UserError becomes three lines and exit code 2."""
    from windlass.launch import local

    try:
        app()
    except UserError as error:
        local.tell(error)
        raise SystemExit(EXIT_USER_ERROR) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None  # before there was a state to save


if __name__ == "__main__":  # `-m windlass.cli` would otherwise do nothing, and say so with 0
    main()
