"""`windlass data lint`: what is wrong with the data that a recipe trains on."""

from pathlib import Path

from windlass.config import RunConfig, load_recipe
from windlass.data.lint.findings import Finding
from windlass.data.lint.lint import FULL, Coverage, LintResult, lint
from windlass.data.prepare.manifest import Prepared, check_shards, load_prepared, open_prepared
from windlass.errors import UserError, nearest
from windlass.model.open_config import model_directory
from windlass.units import format_count


def open_data(path: str, overrides: list[str]) -> tuple[Prepared, RunConfig | None]:
    """The preparation of a recipe with that recipe, or of a directory, without one. Raises UserError."""
    directory = Path(path)
    if not directory.is_dir():
        config = load_recipe(path, *overrides)
        return open_prepared(config.data, config.evaluate.sets), config
    if overrides:
        raise UserError(
            f"{overrides[0]} with the directory {path}",
            "settings replace those of a recipe, and a directory has none",
            "give the recipe instead of the directory, or leave the settings out",
        )
    prepared = load_prepared(directory.absolute())
    if prepared is None:
        raise UserError(
            f"{path} holds no prepared data",
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
        f"--set {name}", f"the sets of {prepared.where} are {', '.join(sets)}", nearest(name, sets) + "give one of them"
    )


def lint_whole(prepared: Prepared, config: RunConfig | None) -> LintResult:
    """Every finding in data that `open_data` opened. Raises UserError."""
    model = None if config is None or config.model.from_ is None else model_directory(config.model)
    return lint(prepared, FULL, model=model, is_isolated=config is not None and config.data.isolate)


def lint_data(path: str, overrides: list[str]) -> tuple[list[str], bool]:
    """(lines to print, whether there is an error). Raises UserError."""
    result = lint_whole(*open_data(path, overrides))
    lines = []
    for finding in result.findings:
        lines += [finding.line, f"  change: {finding.change}"]
    return [*lines, *map(_describe, result.coverage), _verdict(result.findings)], _has_error(result.findings)


def _has_error(findings: list[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)


def _describe(covered: Coverage) -> str:
    part = "all" if covered.samples == covered.of_samples else f"{covered.samples:,} of"
    return (
        f"{covered.name}: {part} {covered.of_samples:,} samples, {covered.documents:,} documents, "
        f"the text of {format_count(covered.text_tokens)} tokens"
    )


def _verdict(findings: list[Finding]) -> str:
    num_errors = sum(finding.severity == "error" for finding in findings)
    if not findings:
        return "nothing found"
    return f"{num_errors} errors, {len(findings) - num_errors} warnings"
