r"""`windlass data inspect`: what is in a prepared set, in a table and as a sample to read; `windlass data report`: as a page.

In colour, tokens that are no target are dim and ends of documents are magenta. Without colour they are marked: ⟦no target⟧.
Control characters of the text are written out (an ESC as \x1b), so that no document can control the terminal.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from windlass.commands.data_lint import choose_set, lint_whole, open_data
from windlass.data.lint.overview import MOST_SAMPLES, overview
from windlass.data.lint.statistics import Segment, Survey, read_sample, sample_number, survey_set
from windlass.data.prepare.manifest import Prepared
from windlass.data.sources.bad_rows import bad_rows_in_words
from windlass.errors import UserError
from windlass.report.page.data_page import data_page
from windlass.report.page.write import write_page
from windlass.safe_text import escaped, shown
from windlass.units import format_bytes, format_count

BAR_WIDTH: Final = 40
MOST_CHARS: Final = 60  # of a document that is left out
TITLES: Final = ("chosen", "rejected")  # the rows of a pair
STYLES: Final = {"context": "dim", "target": "", "masked": "dim", "end": "bold magenta", "padding": "dim italic"}


def print_set(path: str, overrides: list[str], name: str, sample: str, is_plain: bool) -> None:
    """Prints the set `name` of a recipe's or a directory's prepared data. Raises UserError."""
    prepared, config = open_data(path, overrides)
    choose_set(prepared, name)
    is_isolated = config is not None and config.data.isolate
    number = sample_number(prepared, name, sample)
    found, read = survey_set(prepared, name, MOST_SAMPLES), read_sample(prepared, name, number, is_isolated)
    console = Console(file=sys.stdout, no_color=is_plain or None, highlight=False, soft_wrap=True)
    is_marked = is_plain or not console.is_terminal or console.no_color
    for line in describe_set(prepared, found):
        console.print(Text(shown(line)))
    console.print(Text(f"\nsample {number} ({read.where})", style="bold"))
    console.print(Text(_legend(is_marked), style="" if is_marked else "italic"))
    for title, row in zip(TITLES if len(read.rows) > 1 else [""], read.rows):
        if title:
            console.print(Text(f"{title}:", style="bold"))
        console.print(render_sample(row, is_marked))


def write_data_report(path: str, overrides: list[str], output: Path | None) -> Path:
    """Writes the page of a recipe's or a directory's prepared data. -> `output`, or data.html here. Raises UserError."""
    prepared, config = open_data(path, overrides)
    target = output or Path("data.html")
    if not target.parent.is_dir():
        raise UserError(f"--output {target}", f"there is no directory {target.parent}", "make it, or correct the path")
    data, found = None if config is None else config.data, lint_whole(prepared, config)
    shown = overview(prepared, found, data.mixture if data else [], data.labels if data else [])
    return write_page(data_page(shown), target, "windlass data report RECIPE")


def describe_set(prepared: Prepared, found: Survey) -> Iterator[str]:
    info = found.info
    yield f"{prepared.where}: {found.name} (sets: {', '.join(prepared.sets)})"
    left_out = f"; {info.left_out:,} more were too long and are left out" if info.left_out else ""
    if found.rows_per_sample > 1:
        yield f"  pairs       {info.documents:,}, a sample each: prompt and chosen answer, prompt and rejected one{left_out}"
    else:
        cut = f"; the prompts of {info.cut:,} are cut" if info.cut else ""
        yield f"  documents   {info.documents:,}{cut}{left_out}"
    yield f"  tokens      {info.tokens:,} ({format_count(info.tokens)}), each document's EOS among them"
    yield f"  text        {format_bytes(info.bytes)}, {info.bytes / max(1, info.tokens):.2f} bytes per token"
    for field, count in info.unwritten.items():
        yield f"  not learned {field} of {count:,} answers: the chat template does not write it"
    rows = f"{found.rows_per_sample} times " if found.rows_per_sample > 1 else ""
    yield f"  samples     {info.samples:,} of {rows}{found.sequence_length:,} targets"
    positions = info.samples * found.rows_per_sample * found.sequence_length
    yield f"  padding     {info.padding:,} positions of {positions:,}"
    yield from _sources(prepared, found)
    yield from _left_out(prepared, found.name)
    part = "all" if found.num_read == info.samples else f"{found.num_read:,} of {info.samples:,}"
    yield f"in {part} samples:"
    yield f"  fill        {found.fill:.2%}"
    yield f"  in the loss {found.counted:.2%} of what is no padding"
    yield f"  vocabulary  {found.num_distinct:,} of {found.vocab_size:,} ids occur ({found.num_distinct / found.vocab_size:.0%})"
    yield "  frequent    " + " ".join(f"{token!r} {share:.1%}" for token, share in found.frequent)
    yield from _lengths(found)


def _sources(prepared: Prepared, found: Survey) -> Iterator[str]:
    """Each source's share of the shards, for a mixture."""
    counts = found.info.source_shards
    if not counts:
        return
    samples = iter([shard.num_samples for shard in prepared.shards(found.name).shards])
    per_source = [sum(next(samples) for _ in range(count)) for count in counts]
    for number, (source, held) in enumerate(zip(prepared.settings["sources"], per_source, strict=True)):
        name = source.get("hub") or source.get("builtin") or source.get("path")
        yield f"  source {number}    {held:,} samples, {held / sum(per_source):.1%} of the set: {name}"


def _left_out(prepared: Prepared, name: str) -> Iterator[str]:
    """Bad rows, what filters removed, and duplicates, of the sources that the set is made of."""
    given = prepared.settings["validation"]
    is_of_training = name == "train" or (name == "validation" and not (isinstance(given, dict) and "path" in given))
    for title, found in {"bad rows": prepared.bad_rows, "filters": prepared.filtered}.items():
        for use, counts in found.items():
            if use in (name, f"sets.{name}") or (use.startswith("sources.") and is_of_training):
                yield f"  {title:<11} {sum(counts.values()):,} of {use} are left out: {bad_rows_in_words(counts)}"
    if not is_of_training:
        return
    for use, count in prepared.duplicates.items():
        if count:
            yield f"  duplicates  {count:,} of {use} are left out"
    for pair in prepared.near_pairs:
        resembled = f"resembles {pair['kept']:,} ({pair['similarity']:.2f})"
        yield f"  near copy   document {pair['left_out']:,} {resembled}: {pair['left_out_text'][:MOST_CHARS]!r}"


def _lengths(found: Survey) -> Iterator[str]:
    pieces = f"; {found.num_pieces:,} more are not whole in these samples" if found.num_pieces else ""
    yield f"  whole       {len(found.lengths):,} documents{pieces}"
    if not len(found.lengths):
        return
    names = {0: "shortest", 50: "median", 100: "longest"}
    words = [f"{names.get(percent, f'{percent} %')} {tokens:,}" for percent, tokens in found.percentiles.items()]
    yield f"  length      {', '.join(words)} tokens"
    most = max(count for _, count in found.histogram)
    for shortest, count in found.histogram:
        bar = "█" * -(-count * BAR_WIDTH // most)
        yield f"    {shortest:>9,} +  {bar:<{BAR_WIDTH}} {count:,}"


def _legend(is_marked: bool) -> str:
    marks = "⟦no target⟧, plain text is learned" if is_marked else "dim is no target, the rest is learned"
    return f"{marks}; a document ends at each line -----; the first token is context, and the last target of the sample before\n"


def render_sample(segments: list[Segment], is_marked: bool) -> Text:
    """The text of a sample, or of one row of a pair, with a line between documents."""
    text = Text()
    for segment in segments:
        if segment.kind == "padding":
            text.append(f"\n[{segment.num_tokens} positions of padding]", STYLES["padding"])
            continue
        text.append(_marked(segment) if is_marked else escaped(segment.text), STYLES[segment.kind])
        if segment.kind == "end":
            text.append("\n-----\n", STYLES["end"])
    return text


def _marked(segment: Segment) -> str:
    plain = escaped(segment.text)
    return f"⟦{plain}⟧" if segment.kind in ("context", "masked") else plain
