"""What a preparation holds, as the numbers and texts of one page: sets, sources, what was left out, samples, findings.

Amounts are those of prepared.json; lengths and samples are read from the shards (statistics), findings are lint's.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from windlass.data.lint.lint import LintResult
from windlass.data.lint.statistics import Segment, Survey, read_sample, survey_set
from windlass.data.prepare.manifest import Prepared
from windlass.safe_text import escaped, redacted

MOST_SAMPLES: Final = 4000
"""The most samples of a set that its statistics are of."""
SHOWN_SAMPLES: Final = 3
SHOWN_CHARS: Final = 2000  # of a sample


class SourceAmount(NamedTuple):
    """What a set holds of one source."""

    label: str
    documents: int
    tokens: int


class LeftOut(NamedTuple):
    """What was left out of one source: kind or filter -> rows or documents."""

    label: str
    bad_rows: dict[str, int]
    filtered: dict[str, int]
    duplicates: int | None
    """None where duplicates are left in."""


class ShownSample(NamedTuple):
    title: str
    segments: list[Segment]
    is_cut: bool


class SetOverview(NamedTuple):
    survey: Survey
    by_source: list[SourceAmount]
    """Empty for one source, and for a set that is still being written."""
    samples: list[ShownSample]


class Overview(NamedTuple):
    prepared: Prepared
    sets: list[SetOverview]
    left_out: list[LeftOut]
    """Every source that left something out, with what it left out."""
    mixture: list[tuple[int, list[tuple[str, float]]]]
    """(first sample of a stage, [(source, its share)]); empty where sources are not mixed, or the shares are not known."""
    lint: LintResult


def overview(
    prepared: Prepared, lint: LintResult, mixture: Sequence[tuple[int, Sequence[float]]], labels: Sequence[str]
) -> Overview:
    """`mixture`: (first sample, weights), as a recipe gives them; `labels`: of its sources. Raises BadShard."""
    label_of = _labels(prepared, labels)
    sets = [
        SetOverview(
            survey_set(prepared, name, MOST_SAMPLES),
            _by_source(prepared, name, label_of),
            list(_samples(prepared, name)),
        )
        for name in prepared.sets
    ]
    of_sources = (
        LeftOut(label, prepared.bad_rows.get(use, {}), prepared.filtered.get(use, {}), prepared.duplicates.get(use))
        for use, label in label_of.items()
    )
    left_out = [one for one in of_sources if one.bad_rows or one.filtered or one.duplicates is not None]
    of_training = [label for use, label in label_of.items() if use.startswith("sources.")]
    shares = [
        (start, [(label, weight / sum(weights)) for label, weight in zip(of_training, weights)])
        for start, weights in mixture
    ]
    return Overview(prepared, sets, left_out, shares, lint)


def _labels(prepared: Prepared, labels: Sequence[str]) -> dict[str, str]:
    """The label of each source, by its use."""
    given: dict[str, Any] = {f"sources.{number}": one for number, one in enumerate(prepared.settings["sources"])}
    given["validation"] = prepared.settings["validation"]
    given |= {f"sets.{name}": one for name, one in prepared.settings.get("sets", {}).items()}
    named = {use: _label(one) for use, one in given.items() if isinstance(one, dict) and "path" in one}
    return named | {f"sources.{number}": label for number, label in enumerate(labels)}


def _label(source: dict[str, Any]) -> str:
    name = source["hub"] or source["builtin"] or source["path"]
    return redacted(name if isinstance(name, str) else ", ".join(name))


def _by_source(prepared: Prepared, name: str, labels: dict[str, str]) -> list[SourceAmount]:
    """What each training source gave to a set, which has no sources of its own. `labels`: as `_labels`."""
    has_own_sources = name not in ("train", "validation") or (name == "validation" and "validation" in labels)
    amounts = prepared.sets[name].by_source
    of_training = [label for use, label in labels.items() if use.startswith("sources.")]
    if has_own_sources or len(of_training) < 2 or len(amounts) != len(of_training):
        return []
    return [SourceAmount(label, *amount) for label, amount in zip(of_training, amounts)]


def _samples(prepared: Prepared, name: str) -> Iterator[ShownSample]:
    """The first, the last, and some between."""
    last = prepared.sets[name].samples - 1
    for number in sorted({last * at // (SHOWN_SAMPLES - 1) for at in range(SHOWN_SAMPLES)}):
        sample = read_sample(prepared, name, number)
        for title, row in zip(("chosen", "rejected") if len(sample.rows) > 1 else ("",), sample.rows):
            segments, left = list[Segment](), SHOWN_CHARS
            for segment in row:
                text = escaped(segment.text)
                if left > 0:
                    segments.append(segment._replace(text=text[:left]))
                left -= len(text)
            yield ShownSample(f"sample {number:,} {title}".strip(), segments, left < 0)
