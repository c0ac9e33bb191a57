"""`windlass evaluate`, `generate` and `export`: what is done with a model that is there."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.arguments import Base, Nproc, SavedPath, Step, lines_of_stdin, print_lines
from windlass.commands.models.sampling import USUAL, Sampling
from windlass.errors import UserError
from windlass.launch import local
from windlass.safe_text import escaped, escaped_json, say

if TYPE_CHECKING:
    from windlass.commands.models.prompts import Prompt


def evaluate(
    path: SavedPath,
    recipe: Annotated[
        str | None, typer.Option(help="Score on this recipe's prepared sets; for a model that is no run.")
    ] = None,
    step: Step = None,
    sequences: Annotated[
        int | None, typer.Option(help="Sequences per set, instead of the recipe's number; rows per task.")
    ] = None,
    tasks: Annotated[
        Path | None, typer.Option(metavar="FILE|DIRECTORY", help="Run these tasks of lm-eval instead; on one process.")
    ] = None,
    base: Base = None,
    nproc: Nproc = None,
) -> None:
    """Validation loss, perplexity and bits per byte; of conversations, per answer token."""
    if tasks is not None:
        if recipe is not None or nproc not in (None, "1") or local.is_worker():
            raise UserError(
                f"--tasks {tasks} with --recipe, --nproc or a launcher",
                "tasks bring their own data, and run on one process",
                "leave these out",
            )
        from windlass.commands.models.tasks import run_tasks

        print_lines(run_tasks(path, tasks, step=step, base=base, limit=sequences))
        return
    local.check_nproc(nproc)
    local.die_with_agent()
    num_ranks = 1 if local.is_worker() else local.choose_ranks(nproc)
    if num_ranks > 1:
        raise typer.Exit(local.launch_ranks(sys.argv[1:], num_ranks, path))
    from windlass.commands.models.evaluate import evaluate as score

    scores = score(path, step=step, sequences=sequences, base=base, recipe=recipe)
    print_lines(one.line for one in scores)


Chat = Annotated[
    bool,
    typer.Option("--chat", help="Prompts are questions, in the chat template. Without one: a conversation on stdin."),
]
Prompts = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="More prompts, one a line; with --chat also lists of messages as JSON."),
]
TopP = Annotated[float, typer.Option(help="Draw among the likeliest tokens that hold this probability.")]
CutPrompt = Annotated[
    bool,
    typer.Option(
        "--cut-prompt", help="Cut a prompt that leaves no room: a text to its end; of a chat the oldest turns go first."
    ),
]


def generate(
    path: SavedPath,
    prompt: Annotated[
        list[str] | None, typer.Option(help="What the text begins with; may be given several times.")
    ] = None,
    prompts: Prompts = None,
    chat: Chat = False,
    step: Annotated[
        list[int] | None, typer.Option(help="Checkpoints to write from; several show how a run learned.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "--max-new-tokens", help="Longest continuation, in tokens.")
    ] = USUAL.max_tokens,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = USUAL.temperature,
    top_p: TopP = USUAL.top_p,
    seed: Annotated[int, typer.Option(help="The same seed draws the same text.")] = USUAL.seed,
    cut_prompt: CutPrompt = False,
    record: Annotated[bool, typer.Option("--record", help="Write the samples into the run's report, too.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="One object per text: step, prompt, text.")] = False,
    base: Base = None,
) -> None:
    """Text from a model: of a run, a Hugging Face directory, or an adapter."""
    from windlass.commands.models.generate import converse
    from windlass.commands.models.generate import generate as write
    from windlass.commands.models.prompts import read_prompts
    from windlass.training.start.open_saved import step_in

    steps: list[int | None] = [*step] if step else [None]
    sampling = Sampling(max_tokens, temperature, top_p, seed)
    given = [*(prompt or []), *(read_prompts(prompts, chat) if prompts is not None else [])]
    if chat and not given:
        if len(steps) > 1 or record or json_lines:
            raise UserError(
                "--chat without a prompt, with several steps, --record or --json",
                "a conversation is with one model, for a reader, and is not recorded",
                "give one --step, or the questions by --prompt",
            )
        for answer in converse(path, lines_of_stdin(), sampling, step=steps[0], base=base, cut_prompt=cut_prompt):
            print(escaped(answer), flush=True)
        return
    given = given or [""]
    for at in steps:
        texts = write(path, given, sampling, step=at, chat=chat, cut_prompt=cut_prompt, record=record, base=base)
        at = step_in(path, at) if json_lines else at
        for one, text in zip(given, texts):
            shown = _shown_text(one, text, chat)
            if len(steps) > 1 or len(given) > 1:
                shown = f"{'---' if at is None else f'--- step {at}'}\n{shown}"
            print(_object_of(at, one, text) if json_lines else shown, flush=True)


def _object_of(step: int | None, prompt: "Prompt", text: str) -> str:
    return escaped_json(json.dumps({"step": step, "prompt": prompt, "text": text}, ensure_ascii=False))


def _shown_text(prompt: "Prompt", text: str, chat: bool) -> str:
    """Prompt and text; a terminal marks where the model begins."""
    from windlass.commands.models.prompts import shown_prompt

    mark = ("\n=> " if chat else " =>") if sys.stdout.isatty() else "\n" * chat
    return escaped(shown_prompt(prompt) + mark + text)


def export(
    path: SavedPath,
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="TARGET",
            help="Where to. Default: export/ in the run directory, where a new export leaves your files.",
        ),
    ] = None,
    step: Step = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    merge: Annotated[bool, typer.Option("--merge", help="The whole model of a run with an adapter.")] = False,
    base: Base = None,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Then upload it to this repository of the hub (HF_TOKEN).")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: nobody else reads the repository.")] = False,
) -> None:
    """A Hugging Face directory, or PEFT's of an adapter: loaded back and compared before it is there."""
    from windlass.commands.models.export import export as write

    done = write(path, target, step=step, dtype=dtype, merge=merge, base=base, push=push, private=private)
    what = f"adapter; loads in PEFT beside {done.base}" if done.base else f"{dtype}; loads in transformers"
    say(f"{done.directory}: {what}, logits within {done.largest_difference:.1e} of ours, same greedy text")
    if merge and done.merging is not None:
        say(f"merged in fp32: logits within {done.merging.beside:.1e} of the base with its adapter")
    if done.merging is not None and done.merging.in_nf4 is not None:
        say(
            f"the base was in NF4 in training and is as before here: logits differ by {done.merging.in_nf4:.1e} from training's"
        )
    if done.kept:
        say(f"kept: {', '.join(done.kept)}, which no export wrote")
    if done.pushed is not None:
        say(f"pushed: {done.pushed}")
