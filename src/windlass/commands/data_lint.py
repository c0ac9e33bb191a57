"""`windlass data lint`, and the same before step 0: what is wrong with the data that a recipe trains on."""

from pathlib import Path
from typing import Final

from windlass.config import RunConfig, load_recipe
from windlass.data.lint.findings import Finding
from windlass.data.lint.lint import BEFORE_TRAINING, FULL, Limits, LintResult, Looked, lint
from windlass.data.prepare.manifest import Prepared, check_shards, load_prepared, open_prepared
from windlass.errors import BadShard, UserError, nearest
from windlass.runtime import Runtime
from windlass.units import format_count

SHOWN: Final = 3  # errors in the words of a refusal; all others are told by the command

RUNS_OF_REMOTE: Final = 2  # shards of a store that are fetched before step 0, at most twice as many


def open_place(place: str, overrides: list[str]) -> tuple[Prepared, RunConfig | None]:
    """The preparation of a recipe, or that in a directory, which has no recipe. Raises UserError."""
    directory = Path(place)
    if not directory.is_dir():
        config = load_recipe(place, *overrides)
        return open_prepared(config.data, config.evaluate.sets), config
    if overrides:
        raise UserError(
            f"{overrides[0]} with the directory {place}",
            "settings replace those of a recipe, and a directory has none",
            "give the recipe instead of the directory, or leave the settings out",
        )
    prepared = load_prepared(directory.absolute())
    if prepared is None:
        raise UserError(
            f"{place} holds no prepared data",
            "a directory of prepared data holds prepared.json: it is data.directory of a recipe",
            "give that directory or the recipe; `windlass prepare RECIPE` makes it",
        )
    check_shards(prepared)
    return prepared, None


def choose_set(prepared: Prepared, name: str) -> str:
    """`name`, if the preparation has such a set. Raises UserError."""
    if name in prepared.sets:
        return name
    sets = list(prepared.sets)
    raise UserError(
        f"--set {name}", f"the sets of {prepared.place} are {', '.join(sets)}", nearest(name, sets) + "give one of them"
    )


def check(place: str, overrides: list[str]) -> tuple[list[str], bool]:
    """(lines to print, whether there is an error). Raises UserError."""
    prepared, config = open_place(place, overrides)
    result = _lint(prepared, config, FULL)
    lines = []
    for finding in result.findings:
        lines += [finding.line, f"  change: {finding.change}"]
    return [*lines, *map(_told, result.looked), _verdict(result.findings)], _has_error(result.findings)


def check_before_training(prepared: Prepared, config: RunConfig, runtime: Runtime) -> list[str]:
    """Warnings, a line each, of what can be looked at within seconds. Collective. Raises UserError where there are errors,
    BadShard where a shard cannot be read and none may be left out."""
    findings: list[Finding] = []
    notes: list[str] = []
    if runtime.rank == 0:
        limits = BEFORE_TRAINING if prepared.remote is None else BEFORE_TRAINING._replace(runs=RUNS_OF_REMOTE)
        try:
            findings = _lint(prepared, config, limits).findings
        except BadShard as error:
            if config.data.max_bad_shards == 0:
                raise
            notes = [f"the data was not looked at for faults before training: {error.given}"]
    findings, notes = runtime.shared((findings, notes))
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        more = f"; and {len(errors) - SHOWN} more errors" if len(errors) > SHOWN else ""
        raise UserError(
            f"the data in {prepared.place} is wrong: " + "; ".join(f.line for f in errors[:SHOWN]) + more,
            "training begins on data without errors of `windlass data lint`",
            f"{errors[0].change}; all of them: windlass data lint RECIPE",
        )
    return notes + [finding.line for finding in findings]


def _lint(prepared: Prepared, config: RunConfig | None, limits: Limits) -> LintResult:
    if config is None:
        return lint(prepared, limits)
    model = config.model.directory() if config.model.from_ is not None else None
    return lint(prepared, limits, model=model, is_isolated=config.data.isolate)


def _has_error(findings: list[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)


def _told(looked: Looked) -> str:
    part = "all" if looked.samples == looked.of_samples else f"{looked.samples:,} of"
    return (
        f"{looked.name}: {part} {looked.of_samples:,} samples, {looked.documents:,} documents, "
        f"the text of {format_count(looked.text_tokens)} tokens"
    )


def _verdict(findings: list[Finding]) -> str:
    num_errors = sum(finding.severity == "error" for finding in findings)
    if not findings:
        return "nothing found"
    return f"{num_errors} errors, {len(findings) - num_errors} warnings"
