"""Runs every check over prepared data, and reports how much of it was read.

`lint` reads only the shards, so it checks what training would read. A small set is read whole; of a larger one runs of
neighbouring samples. Documents are reassembled (documents), compared by hash, and decoded until a budget of tokens is spent.

    check_tokenizer     the tokenizer's EOS, and the model's tokenizer
    check_ids           masks, borders, vocabulary, copies within a set and between sets
    check_preferences   prompts and answers of preferences
    check_text          damaged text, special tokens as text, copies up to white space and case
"""

from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from tokenizers import Tokenizer

from windlass.data.lint.check_ids import BlockChecks, DocumentChecks, Expected, Seen, Vocabulary, check_overlap
from windlass.data.lint.check_preferences import PairChecks
from windlass.data.lint.check_text import Folded, OfTrain, TextChecks
from windlass.data.lint.check_tokenizer import check_eos, check_model, open_vocabulary
from windlass.data.lint.documents import NUM_RUNS, DocumentWalk, blocks, position, runs_of
from windlass.data.lint.findings import Finding, Findings
from windlass.data.prepare.manifest import Prepared
from windlass.data.shards.mds import Reader
from windlass.data.tokenize.chat_template import check_template
from windlass.data.tokenize.preferences import ROWS


class Limits(NamedTuple):
    """How much of each set is read."""

    whole_tokens: int
    """A set with no more tokens than this is read whole."""
    samples: int
    """Samples that are read of a larger set."""
    text_tokens: int
    """Tokens that are decoded to text."""
    runs: int = NUM_RUNS
    """Runs of neighbouring samples that are read of a larger set: each may be a shard to fetch."""


FULL: Final = Limits(whole_tokens=50_000_000, samples=20_000, text_tokens=20_000_000)
BEFORE_TRAINING: Final = Limits(whole_tokens=4_000_000, samples=400, text_tokens=200_000)


class Coverage(NamedTuple):
    """How much of a set was read."""

    name: str
    samples: int
    of_samples: int
    documents: int
    text_tokens: int


class LintResult(NamedTuple):
    findings: list[Finding]
    coverage: list[Coverage]


def lint(
    prepared: Prepared, limits: Limits = FULL, *, model: Path | None = None, is_isolated: bool = False
) -> LintResult:
    """Every finding, errors first. `model`: the directory of the weights that training starts from; `is_isolated`: whether
    attention stays inside documents.

    Raises BadShard where a shard cannot be read, UserError where the tokenizer cannot be.
    """
    general = Findings("tokenizer")
    tokenizer, vocabulary = open_vocabulary(prepared)
    check_eos(general, tokenizer, vocabulary)
    if model is not None:
        check_model(general, prepared, tokenizer, model)
    is_chat = any(expected_of(prepared, name, is_isolated).format in ("chat", "mixed") for name in prepared.sets)
    if is_chat and (wrong := check_template(prepared.tokenizer_directory)) is not None:
        general.add("template-round-trip", wrong)
    findings, coverage = general.list(), []
    hashes: dict[str, tuple[Seen, Reader]] = {}
    of_train: OfTrain | None = None
    for name in sorted(prepared.sets, key=lambda name: name != "train"):  # the others are compared with it
        found, reader = Findings(name), Reader(prepared.shards(name))
        parts = (tokenizer, vocabulary, expected_of(prepared, name, is_isolated))
        seen, documents, folded = _check_set(
            found, reader, *parts, prepared.settings["sequence_length"], limits, of_train
        )
        if name == "train":
            of_train = folded, partial(position, reader)
        coverage.append(seen)
        hashes[name] = (documents, reader)
        if name != "train":
            train, train_reader = hashes["train"]
            check_overlap(found, train, documents, partial(position, reader), partial(position, train_reader))
        findings += found.list()
    return LintResult(sorted(findings, key=lambda finding: finding.severity), coverage)


def _check_set(
    found: Findings,
    reader: Reader,
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    expected: Expected,
    sequence_length: int,
    limits: Limits,
    of_train: OfTrain | None,
) -> tuple[Coverage, Seen, Folded]:
    """How much was read, and the documents' hashes: exact, and folded."""
    where = partial(position, reader)
    is_all = expected.tokens <= limits.whole_tokens or reader.num_samples <= limits.samples
    runs = runs_of(reader.num_samples, reader.num_samples if is_all else limits.samples, limits.runs)
    by_block = BlockChecks(found, vocabulary, expected, where)
    by_document = DocumentChecks(found, expected, where, sequence_length)
    is_plain = expected.format in ("text", "samples") and expected.bytes_add_up
    by_text = TextChecks(found, vocabulary, tokenizer, where, limits.text_tokens, is_plain, of_train)
    by_pair = PairChecks(found, where)
    documents = DocumentWalk(vocabulary.eos_id)
    is_pairs = expected.format == "preference"
    is_samples = expected.format == "samples"
    for block in blocks(reader, runs, ROWS if is_pairs else 1, expected.format == "text" or is_samples, is_samples):
        by_block.add(block)
        if is_pairs:
            by_pair.add(block)
        for document in documents.add(block):
            by_document.add(document)
            by_text.add(document)
    for document in documents.end():
        by_document.add(document)
    by_pair.end()
    by_document.end()
    by_block.end(is_all)
    by_text.end()
    seen = Coverage(found.name, by_block.num_samples, reader.num_samples, by_document.num_documents, by_text.num_tokens)
    return seen, by_pair.seen if is_pairs else by_document.seen, by_text.folded


def expected_of(prepared: Prepared, name: str, is_isolated: bool) -> Expected:
    """What a set must be like by the settings of the preparation."""
    settings, info = prepared.settings, prepared.sets[name]
    if name == "train":
        sources = settings["sources"]
    elif name == "validation":
        given = settings["validation"]
        sources = [given] if isinstance(given, dict) and "path" in given else settings["sources"]
    else:
        sources = [settings["sets"][name]]
    has_samples = any(source.get("stored") == "samples" for source in sources)
    formats = {str(source.get("format", "text")).replace("tokens", "text") for source in sources}
    if has_samples and formats == {"text"}:
        formats = {"samples"}
    is_pairs = formats == {"preference"}
    return Expected(
        format=formats.pop() if len(formats) == 1 else "mixed",
        is_isolated=is_isolated,
        is_packed_whole=settings.get("packing") == "best-fit" or is_pairs,
        documents=0 if has_samples else info.documents * (ROWS if is_pairs else 1),  # EOS may be anywhere in a row
        tokens=info.tokens,
        samples=info.samples,
        bytes_add_up=info.bytes_add_up,
    )
