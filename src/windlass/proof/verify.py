"""`windlass verify RECIPE`: the recipe's layout, proved equal to one process on a tiny proxy model.

    fold           the layout, as it is or folded to the ranks at hand
    proxy model    a model of fifty thousand parameters with the recipe's features, in fp64
    proof          `train` itself runs it on gloo ranks; torch and transformers alone train the same on one process
    differences    drawn weights, residual stream, loss, every gradient, norm, weights after three steps, what is reported; then
                   the run resumes as a killed one does: in its own directory from step 1, on the same layout, on one process,
                   and from that one's step 2 on the layout again

The model, loss, clip and updates of the reference run are torch's and transformers', so a mistake of ours in them cannot cancel.
Our code gives it token ids, rates and names of tensors; it finds the documents' borders itself. Where it cannot train the proxy
model (dropout), our own decoder trains it on one process. Each verdict ends with a list of what it did not prove.
"""

import contextlib
import io
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from windlass.config import RunConfig, check_recipe, load_recipe
from windlass.data.batch_fields import Batch
from windlass.data.prepare.prepare import Prepared, prepare
from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.chunks import USUAL
from windlass.model.open_config import architecture_of
from windlass.proof.compare import ProofRow, compare_events, compare_resumed, compare_training, same_rows, tensors
from windlass.proof.fold_layout import Cell, Folding, fold_onto_ranks
from windlass.proof.pool import MAX_RANKS, RankFailed, Ranks
from windlass.proof.proxy import STEPS, ProxyModel, make_proxy
from windlass.proof.reference_run import (
    ReferenceRun,
    by_our_names,
    counted_behind_borders,
    counted_in_rest,
    counted_per_batch,
    drawn,
    drops,
    global_rows,
    has_reference,
    held_out_rows,
    reference,
    trimmed,
    write_model,
)
from windlass.proof.verdict import Verdict, conclude, print_verdict, write
from windlass.proof.watch import draw, train_proxy
from windlass.report.events import read_events
from windlass.safe_text import say
from windlass.training.start.parameter_rules import rules_of
from windlass.training.start.pins import pin_model

AT_HAND: Final = 8
"""Default of `--nproc`."""
LIMIT_S: Final = 600.0
"""A training of three steps takes seconds; on a machine that is busy with other work, minutes. A rank that takes longer hangs."""
SEEDS: Final = 50  # that are tried for rows which reach every part of the loss; chosen
NEVER_PROVED: Final = (
    "bf16, fp16 and fp8, what adds up gradients of 16 bits (precision/masters.py), and the kernels of a GPU: the proxy model "
    "runs in fp64 on CPU",
    "sizes: overflow of indices, memory and time show at the recipe's own sizes only (`windlass train --smoke`)",
    "what comes before the layout: sources, mixtures, chat, weights of answers, the order over epochs, the schedule of the rate",
    "packing: both sides read the samples that one preparation of ours packed",
    "the spread of drawn weights: both sides draw them by one rule of ours",
)


def verify(recipe: str, overrides: Sequence[str] = (), nproc: int | None = None, json_file: Path | None = None) -> bool:
    """Proves and prints; whether everything agrees. `recipe`: a file, or the name of a shipped one; `nproc`: processes at hand, 8
    if None; `json_file`: the verdict is written there too. Raises UserError."""
    _check_options(nproc, json_file)
    config = pin_model(load_recipe(recipe, *overrides))
    architecture = architecture_of(config.model, config.data.tokenizer.train or 1)
    config.check_layout(architecture)
    rules_of(config, architecture)
    folding = fold_onto_ranks(config.parallel, nproc, AT_HAND)
    console = Console(highlight=False)
    verdicts, unproved = [], [*folding.unproved, *NEVER_PROVED]
    pool = Ranks(lambda crash: say(f"warning: {crash}", sys.stderr))
    try:
        for verdict, more in prove_all(config, architecture, folding, pool):
            verdicts.append(verdict)
            unproved += [sentence for sentence in more if sentence not in unproved]
            print_verdict(verdict, console)
    finally:
        pool.close()
    agree = all(verdict.agrees for verdict in verdicts)
    conclude(verdicts, unproved, console)
    if json_file is not None:
        write(json_file, recipe, list(overrides), verdicts, unproved, agree)
    return agree


def prove_all(
    config: RunConfig, architecture: Architecture, folding: Folding, pool: Ranks
) -> Iterator[tuple[Verdict, tuple[str, ...]]]:
    """Each cell's verdict, and sentences on what its proxy model lacks."""
    for cell in folding.cells:
        with tempfile.TemporaryDirectory(prefix="windlass-verify-") as directory:
            proxy = make_proxy(config, architecture, cell, Path(directory))
            start_s = time.monotonic()
            verdict = prove(proxy, cell, pool)
            verdict.elapsed_s = time.monotonic() - start_s
        yield verdict, (*proxy.unproved, *verdict.unproved)


def prove(proxy: ProxyModel, cell: Cell, pool: Ranks) -> Verdict:
    """One layout against one process, whole and resumed."""
    architecture, verdict = proxy.architecture, Verdict(cell)
    prepared = prepare(proxy.config.data, {}, log=lambda _line: None)
    write_model(proxy.directory / "model", architecture)
    proxy, rows = _with_seed_for_rows(proxy, prepared, cell)
    config, borders = proxy.config, proxy.borders(cell.layout.tp)
    given = rows, held_out_rows(config, prepared)
    try:
        proxy = clipping_some(proxy, _reference_run(proxy, "norms", given, pool, verdict).norms)
        one_process = _reference_run(proxy, "one", given, pool, verdict)
        if not min(one_process.norms) < proxy.config.optim.max_norm < max(one_process.norms):
            verdict.unproved.append("optim.max_norm: the proxy model's steps are all clipped, or none is")
        seen = pool.run(cell.world, train_proxy, proxy.config, borders, proxy.chunks, timeout_s=LIMIT_S)
        lines = read_events(config.run.directory / "events.jsonl")
        verdict.rows += [
            same_rows(seen, rows),
            *_drawn(proxy, cell, pool),
            *compare_training(seen, one_process, architecture),
        ]
        if verdict.first is None:  # else every later number differs too
            verdict.rows += compare_events(lines, one_process)
            _go_on(proxy, cell, pool, one_process, verdict)
    except RankFailed as failure:
        verdict.failed = str(failure)
    return verdict


def _with_seed_for_rows(proxy: ProxyModel, prepared: Prepared, cell: Cell) -> tuple[ProxyModel, list[Batch]]:
    """The proxy model with the first seed whose rows reach every part of the loss, and these rows. Each step counts a target;
    step 1, whose gradients are compared, counts some in the head's last chunk and, with isolation, behind a document's border."""
    micro, borders = proxy.config.micro_batch, proxy.borders(cell.layout.tp)
    has_rest = micro * proxy.config.data.sequence_length // cell.layout.context % proxy.head_tokens > 0
    for seed in range(proxy.config.run.seed, proxy.config.run.seed + SEEDS):
        config = _changed(proxy.config, run={"seed": seed})
        rows = global_rows(config, prepared, drops(config, proxy.architecture), borders)
        in_rest = counted_in_rest(rows[0], micro, proxy.head_tokens, cell.layout.context)
        if (
            all(counted_per_batch(rows))
            and (in_rest or not has_rest)
            and (not config.data.isolate or counted_behind_borders(rows[0]))
        ):
            return replace(proxy, config=config), rows
    raise AssertionError(f"none of {SEEDS} seeds gives rows that reach every part of the loss")


def _changed(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """The config with these settings of its sections."""
    tree = config.model_dump(mode="json", by_alias=True)
    for name, settings in sections.items():
        tree[name] |= settings
    return check_recipe(tree)


def clipping_some(proxy: ProxyModel, norms: Sequence[float]) -> ProxyModel:
    """The proxy model with a clip in the widest gap between its steps' norms: it cuts some steps, and leaves some alone."""
    rising = sorted(norms)
    low, high = max(itertools.pairwise(rising), key=lambda pair: pair[1] - pair[0])
    return replace(proxy, config=_changed(proxy.config, optim={"max_norm": (low + high) / 2}))


def _drawn(proxy: ProxyModel, cell: Cell, pool: Ranks) -> list[ProofRow]:
    """The weights that the recipe begins with, where it has no model to begin with: every rank's part of one whole."""
    if not proxy.is_drawn:
        return []
    held = pool.run(cell.world, draw, proxy.config, proxy.architecture, timeout_s=LIMIT_S)
    ours = [trimmed(found, proxy.architecture) for found in held]
    return [tensors("drawn weights", ours, drawn(proxy.config, proxy.architecture), proxy.architecture)]


def _reference_run(
    proxy: ProxyModel, name: str, given: tuple[list[Batch], list[Batch]], pool: Ranks, verdict: Verdict
) -> ReferenceRun:
    """What one process trains. `given`: the rows to learn and those to score."""
    rows, held_out = (counted_per_batch(some, proxy.config.data.is_preference) for some in given)
    targets = rows, sum(held_out)
    why_not = has_reference(proxy.config, proxy.architecture)
    if why_not is None:
        with contextlib.redirect_stderr(io.StringIO()):  # transformers' progress bar
            trace = reference(proxy.config, proxy.architecture, proxy.directory / "model", *given)
        found = (trace.gradients, trace.first_weights, trace.weights)
        gradients, first, weights = (by_our_names(tensors, proxy.architecture) for tensors in found)
        return ReferenceRun(
            trace.losses,
            trace.norms,
            gradients,
            first,
            weights,
            trace.evaluations,
            trace.figures,
            trace.streams,
            *targets,
        )
    verdict.against = f"our own decoder on one process ({why_not})"
    sentence = f"the decoder on one process, which is ours on both sides here: {why_not}"
    verdict.unproved += [sentence] * (sentence not in verdict.unproved)
    borders = proxy.borders(verdict.cell.layout.tp)
    (one,) = pool.run(1, train_proxy, _on_one_process(proxy, proxy.directory / name), borders, USUAL, timeout_s=LIMIT_S)
    held = (one.gradients, one.first_weights, one.weights)
    gradients, first, weights = (trimmed(found, proxy.architecture) for found in held)
    return ReferenceRun(
        one.losses, one.norms, gradients, first, weights, one.evaluations, one.figures, one.streams, *targets
    )


def _go_on(proxy: ProxyModel, cell: Cell, pool: Ranks, one_process: ReferenceRun, verdict: Verdict) -> None:
    """The run killed and resumed; `after`: the step of its newest checkpoint. Without accumulation, but for a pipeline, which
    needs its micro-batches."""
    alone = _on_one_process(proxy, proxy.config.run.directory)
    roads = [("resumed", 1, cell.world, proxy.config if cell.layout.pp > 1 else _without_accumulation(proxy, cell))]
    if cell.world > 1:
        roads += [("resumed on one process", 1, 1, alone), ("and back", 2, cell.world, proxy.config)]
    for what, after, world, config in roads:
        for later in range(after + 1, STEPS + 1):
            shutil.rmtree(config.run.directory / "checkpoints" / f"step-{later:08d}")
        seen = pool.run(world, train_proxy, config, proxy.borders(cell.layout.tp), proxy.chunks, timeout_s=LIMIT_S)
        verdict.rows += compare_resumed(what, after, seen, one_process, proxy.architecture)


def _on_one_process(proxy: ProxyModel, directory: Path) -> RunConfig:
    """The proxy model's config without its layout, to run in `directory`."""
    tree = proxy.config.model_dump(mode="json", by_alias=True)
    tree["run"] |= {"directory": str(directory)}
    tree["parallel"] = {}
    return check_recipe(tree)


def _without_accumulation(proxy: ProxyModel, cell: Cell) -> RunConfig:
    """The proxy model's config with one micro-batch per rank and step."""
    return _changed(proxy.config, run={"micro_batch": proxy.config.sequences_per_step // cell.layout.batch_ranks})


def _check_options(nproc: int | None, json_file: Path | None) -> None:
    if nproc is not None and not 1 <= nproc <= MAX_RANKS:
        raise UserError(
            f"--nproc {nproc}",
            f"a proof runs on 1 to {MAX_RANKS} processes of this machine; a larger layout is folded to them",
            f"for example --nproc {AT_HAND}",
        )
    if json_file is not None and (json_file.is_dir() or not json_file.absolute().parent.is_dir()):
        raise UserError(
            f"--json {json_file}",
            "the verdict is written to a file in a directory that exists",
            "give the name of a file, such as --json verdict.json",
        )
