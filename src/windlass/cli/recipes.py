"""`windlass init`, `import` and `keys`: where a recipe comes from, and what its keys mean."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.arguments import complete_section, print_lines
from windlass.safe_text import say


def init(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The recipe to write.")] = Path(
        "recipe.yaml"
    ),
    data: Annotated[
        str | None, typer.Option(help="A file, a directory, a glob, a URL, or a dataset of the hub.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A hub name or a directory to finetune; small: a new one of a million parameters."),
    ] = None,
    steps: Annotated[str | None, typer.Option(metavar="N", help="Optimizer steps, such as 1000 or 1k.")] = None,
    kind: Annotated[str | None, typer.Option(help="pretrain, sft or dpo. Default: by the rows of the data.")] = None,
) -> None:
    """Write a short recipe that runs, from three questions or the flags that answer them."""
    from windlass.commands.recipes import new_recipe

    def ask(question: str, default: str) -> str:
        return str(typer.prompt(question, default=default or None, err=True))

    chose, to_mend = new_recipe.init(out, data, model, steps, kind, ask if sys.stdin.isatty() else None)  # type: ignore[arg-type]
    print_lines(chose)
    for sentence in to_mend:
        say(f"Before it can run: {sentence}")
    say(f"{out} is written. {'Then' if to_mend else 'Next'}: windlass train {out}")


def import_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A recipe of axolotl, LLaMA-Factory or torchtune.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Default: standard output.")] = None,
    tool: Annotated[
        str | None, typer.Option(help="axolotl, llama-factory or torchtune, where the keys do not say it.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes that the file was meant for: they make the batch.")] = 1,
) -> None:
    """Turn another tool's recipe into one of ours. What does not map is named, there and on the terminal."""
    from windlass.commands.recipes import new_recipe

    recipe, found = new_recipe.import_file(file, out, tool, ranks)
    if out is None:
        say(recipe.rstrip("\n"))
    for given, ours in found.mapped:
        say(f"{given} -> {ours}", sys.stderr)
    for given, reason in found.left:
        say(f"not mapped: {given}: {reason}", sys.stderr)
    if found.silent:
        say(f"nothing to set here for: {', '.join(found.silent)}", sys.stderr)
    if out is not None:
        say(
            f"{out} is written: {len(found.mapped)} settings, {len(found.left)} not mapped. "
            f"Next: look at data.sources, then windlass train {out}"
        )


def keys(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="A section, or a key. Default: all sections.", autocompletion=complete_section
        ),
    ] = None,
) -> None:
    """What the keys of a recipe are: type, default and meaning, such as `windlass keys optim`."""
    from windlass.keys import describe_keys

    print_lines(describe_keys(name))
