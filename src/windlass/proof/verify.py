"""`windlass verify RECIPE`: the recipe's layout, proved equal to one process on a tiny twin.

    fold     the layout, as it is or folded to the ranks at hand
    twin     a model of fifty thousand parameters with the recipe's features, in fp64
    proof    `train` itself runs it on gloo ranks; torch and transformers alone train the same on one process
    differences   drawn weights, loss, every gradient, norm, weights after three steps, what is reported; then the run goes on as
             one does that was killed: in its own directory from step 1, on the same layout, on one process, and from that
             one's step 2 on the layout again

The oracle's model, loss, clip and updates are torch's and transformers', so a mistake of ours in them cannot cancel. It is given
rows, rates and names of tensors by our code. Where it cannot train the twin (dropout), our own decoder on one process stands in,
and that is said. What was not proved is said at the end, each time.
"""

import contextlib
import io
import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from windlass.config import RunConfig, check_recipe, load_recipe
from windlass.data.prepare.prepare import Prepared, prepare
from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.chunks import Chunks
from windlass.parallel.program import Batch
from windlass.proof.compare import ProofRow, compare, compare_resumed, reported, same_rows, tensors
from windlass.proof.fold_layout import Cell, Folding, fold
from windlass.proof.pool import MAX_RANKS, RankFailed, Ranks
from windlass.proof.proxy import STEPS, Twin, make_twin
from windlass.proof.reference_run import (
    Truth,
    by_our_names,
    counted,
    drawn,
    global_rows,
    has_reference,
    held_out_rows,
    reference,
    trimmed,
    write_model,
)
from windlass.proof.verdict import Verdict, conclude, show, write
from windlass.proof.watch import borders_of, draw, train_proxy
from windlass.report.events import read_events
from windlass.training.parameter_rules import rules_of
from windlass.training.pins import pin_model

AT_HAND: Final = 8
"""Ranks that `--nproc` stands for where it is not given."""
LIMIT_S: Final = 600.0
"""A training of three steps takes seconds; on a machine that is busy with other work, minutes. A rank that takes longer hangs."""
CHUNKS: Final = Chunks(head_logits=3_000, attention_weights=200)
SEEDS: Final = 50
NEVER_PROVED: Final = (
    "bf16, fp16 and fp8, and the kernels of a GPU: the twin runs in fp64 on CPU",
    "sizes: overflow of indices, memory and time show at the recipe's own sizes only (`windlass train --smoke`)",
    "what lies before the layout: sources, mixtures, chat, the order over epochs, the schedule of the rate",
)


def verify(recipe: str, overrides: list[str], nproc: int | None, json_file: Path | None) -> bool:
    """Proves and prints; whether everything agrees. Raises UserError."""
    _check_options(nproc, json_file)
    config = pin_model(load_recipe(recipe, *overrides))
    architecture = config.model.architecture(config.data.tokenizer.train or 1)
    config.check_layout(architecture)
    rules_of(config, architecture)
    folding = fold(config.parallel, nproc, AT_HAND)
    console = Console(highlight=False)
    verdicts, unproved = [], [*folding.unproved, *NEVER_PROVED]
    pool = Ranks()
    try:
        for verdict, more in prove_all(config, architecture, folding, pool):
            verdicts.append(verdict)
            unproved += [sentence for sentence in more if sentence not in unproved]
            show(verdict, console)
    finally:
        pool.close()
    agree = all(verdict.agrees for verdict in verdicts)
    conclude(verdicts, unproved, console)
    if json_file is not None:
        write(json_file, recipe, overrides, verdicts, unproved, agree)
    return agree


def prove_all(
    config: RunConfig, architecture: Architecture, folding: Folding, pool: Ranks
) -> Iterator[tuple[Verdict, tuple[str, ...]]]:
    """Each cell's verdict, and sentences on what its twin lacks."""
    for cell in folding.cells:
        with tempfile.TemporaryDirectory(prefix="windlass-verify-") as directory:
            twin = make_twin(config, architecture, cell, Path(directory))
            start_s = time.monotonic()
            verdict = prove(twin, cell, pool)
            verdict.elapsed_s = time.monotonic() - start_s
        yield verdict, (*twin.unproved, *verdict.unproved)


def prove(twin: Twin, cell: Cell, pool: Ranks) -> Verdict:
    """One layout against one process, whole and resumed."""
    architecture, verdict = twin.architecture, Verdict(cell)
    prepared = prepare(twin.config.data, {}, log=lambda _line: None)
    write_model(twin.directory / "model", architecture)
    twin, rows = _with_targets(twin, prepared, borders_of(architecture, cell.layout.tp))
    config, borders = twin.config, borders_of(architecture, cell.layout.tp)
    given = rows, held_out_rows(config, prepared)
    try:
        twin = clipping_some(twin, _truth(twin, "norms", given, pool, verdict).norms)
        truth = _truth(twin, "one", given, pool, verdict)
        if not min(truth.norms) < twin.config.optim.max_norm < max(truth.norms):
            verdict.unproved.append("optim.max_norm: the twin's steps are all clipped, or none is")
        seen = pool.run(cell.world, train_proxy, twin.config, borders, CHUNKS, timeout_s=LIMIT_S)
        lines = read_events(config.run.directory / "events.jsonl")
        verdict.rows += [same_rows(seen, rows), *_drawn(twin, cell, pool), *compare(seen, truth, architecture)]
        if verdict.first is None:  # else every later number differs too
            verdict.rows += reported(lines, truth)
            _go_on(twin, cell, pool, truth, verdict)
    except RankFailed as failure:
        verdict.failed = str(failure)
    return verdict


def _with_targets(twin: Twin, prepared: Prepared, borders: Sequence[int]) -> tuple[Twin, list[Batch]]:
    """The twin with the first seed whose steps all count a target, and its rows: all of three rows may be ones that lose all."""
    for seed in range(twin.config.run.seed, twin.config.run.seed + SEEDS):
        config = _changed(twin.config, run={"seed": seed})
        rows = global_rows(config, prepared, bool(twin.architecture.dropout), borders)
        if all(counted(rows)):
            return replace(twin, config=config), rows
    raise AssertionError(f"none of {SEEDS} seeds gives every step a target")


def _changed(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """The config with these settings of its sections."""
    tree = config.model_dump(mode="json", by_alias=True)
    for name, settings in sections.items():
        tree[name] |= settings
    return check_recipe(tree)


def clipping_some(twin: Twin, norms: Sequence[float]) -> Twin:
    """The twin with a clip in the widest gap between its steps' norms: some steps it cuts down, and some it leaves alone."""
    rising = sorted(norms)
    low, high = max(itertools.pairwise(rising), key=lambda pair: pair[1] - pair[0])
    return replace(twin, config=_changed(twin.config, optim={"max_norm": (low + high) / 2}))


def _drawn(twin: Twin, cell: Cell, pool: Ranks) -> list[ProofRow]:
    """The weights that the recipe begins with, where it has no model to begin with: every rank's part of one whole."""
    if not twin.is_drawn:
        return []
    held = pool.run(cell.world, draw, twin.config, twin.architecture, timeout_s=LIMIT_S)
    ours = [trimmed(found, twin.architecture) for found in held]
    return [tensors("drawn weights", ours, drawn(twin.config, twin.architecture), twin.architecture)]


def _truth(twin: Twin, name: str, given: tuple[list[Batch], list[Batch]], pool: Ranks, verdict: Verdict) -> Truth:
    """What one process trains. `given`: the rows to learn and those to score."""
    rows, held_out = map(counted, given)
    targets = rows, sum(held_out)
    why_not = has_reference(twin.config, twin.architecture)
    if why_not is None:
        with contextlib.redirect_stderr(io.StringIO()):  # transformers' progress bar
            trace = reference(twin.config, twin.directory / "model", *given)
        found = (trace.gradients, trace.first_weights, trace.weights)
        gradients, first, weights = (by_our_names(tensors, twin.architecture) for tensors in found)
        return Truth(trace.losses, trace.norms, gradients, first, weights, trace.evaluations, trace.figures, *targets)
    verdict.against = f"our own decoder on one process ({why_not})"
    borders = borders_of(twin.architecture, verdict.cell.layout.tp)
    (one,) = pool.run(
        1, train_proxy, _on_one_process(twin, twin.directory / name), borders, Chunks(), timeout_s=LIMIT_S
    )
    held = (one.gradients, one.first_weights, one.weights)
    gradients, first, weights = (trimmed(found, twin.architecture) for found in held)
    return Truth(one.losses, one.norms, gradients, first, weights, one.evaluations, one.figures, *targets)


def _go_on(twin: Twin, cell: Cell, pool: Ranks, truth: Truth, verdict: Verdict) -> None:
    """The run as one finds it that was killed, and goes on: `after` the step of its newest checkpoint. Without accumulation
    where there is no pipeline, which needs its micro-batches."""
    alone = _on_one_process(twin, twin.config.run.directory)
    roads = [("resumed", 1, cell.world, twin.config if cell.layout.pp > 1 else _without_accumulation(twin, cell))]
    if cell.world > 1:
        roads += [("resumed on one process", 1, 1, alone), ("and back", 2, cell.world, twin.config)]
    for what, after, world, config in roads:
        for later in range(after + 1, STEPS + 1):
            shutil.rmtree(config.run.directory / "checkpoints" / f"step-{later:08d}")
        seen = pool.run(
            world, train_proxy, config, borders_of(twin.architecture, cell.layout.tp), CHUNKS, timeout_s=LIMIT_S
        )
        verdict.rows += compare_resumed(what, after, seen, truth, twin.architecture)


def _on_one_process(twin: Twin, directory: Path) -> RunConfig:
    """The twin's config without its layout, to run in `directory`."""
    tree = twin.config.model_dump(mode="json", by_alias=True)
    tree["run"] |= {"directory": str(directory)}
    tree["parallel"] = {}
    return check_recipe(tree)


def _without_accumulation(twin: Twin, cell: Cell) -> RunConfig:
    """The twin's config with one micro-batch per rank and step."""
    return _changed(twin.config, run={"micro_batch": twin.config.sequences_per_step // cell.layout.batch_ranks})


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
            "the verdict is written to a file in a directory that is there",
            "give the name of a file, such as --json verdict.json",
        )
