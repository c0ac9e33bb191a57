"""What a recipe may say about one source of documents. Checked when it is made, without touching a file. No torch."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, get_args

from pydantic import Discriminator, Field, Tag, field_validator

from windlass.data.curate.config import FiltersConfig
from windlass.data.sources.shape_config import SHAPES, RowsConfig
from windlass.data.sources.shape_config import FillInMiddleConfig as FillInMiddleConfig
from windlass.hub.config import NAME
from windlass.safe_text import HIDDEN, redacted
from windlass.settings import BrokenRule, Count, Settings

SLICE = re.compile(r"(\d*):(\d*)")
DEFAULT_SPLIT = "train"
Format = Literal["text", "chat", "preference", "tokens"]
TokensKind = Literal["mds", "megatron", "bin"]
Kind = Literal["jsonl", "json", "csv", "tsv", "parquet", "arrow", "text"] | TokensKind
IdType = Literal["uint16", "uint32", "int32", "int64"]
Stored = Literal["stream", "documents", "samples"]
TOKENS_KINDS = get_args(TokensKind)
TooLong = Literal["refuse", "drop", "cut-prompt"]
MAX_ROW_MIB = 64
CONVERSATION = "messages, or prompt and completion"
PAIR = "chosen and rejected"
MOST_ROWS = 10**18  # what counts rows and tokens holds 63 bits
HELD = {"chat": CONVERSATION, "preference": PAIR}  # what the rows hold that are no plain text


class BadRowsConfig(Settings):
    """Rows of a source that are not documents: bad JSON, no text or a null, another type or shape, half of a surrogate pair, a
    special token in a user's words, an empty answer. All of them are named before anything is encoded."""

    at_most: int | float = 0
    """Bad rows that may be left out; with more, `prepare` refuses the source. A whole number is a count, a decimal between 0
    and 1 a share of the source's rows."""
    report: str | None = None
    """A local file that lists every bad row, one line of JSON each."""

    @field_validator("at_most", mode="before")
    @classmethod
    def _count_or_share(cls, given: object) -> object:
        is_count = isinstance(given, int) and not isinstance(given, bool) and given >= 0
        if not is_count and not (isinstance(given, float) and 0 < given < 1):
            rule = "the limit is a count (a whole number, 0 or more) or a share (a decimal between 0 and 1)"
            change = "set .at_most=10 for ten rows, or .at_most=0.01 for one row in a hundred"
            raise BrokenRule({"at_most": "null" if given is None else given}, rule, change)
        return given

    @field_validator("report")
    @classmethod
    def _local(cls, report: str | None) -> str | None:
        if report is not None and ("://" in report or not report):
            raise BrokenRule({"report": report}, "the report is a local file", "give a local file as .report")
        return report


def _text_or_mapping(value: object) -> str:
    return "mapping" if isinstance(value, (dict, RowsConfig)) else "text"


class SourceConfig(Settings):
    """Where documents come from: exactly one of `path`, `hub` and `builtin`."""

    path: str | list[str] | None = None
    """A file, a directory, a glob (`**` allowed) or a URL that fsspec opens (s3://, gs://, https://, hf://; globs if the store
    can list), or a list of these. One document is a line of a `.jsonl` or `.ndjson` file, a row of a `.parquet`, `.arrow`,
    `.feather`, `.csv` or `.tsv` file, an object of a `.json` file (an array, lines, or one object), or any other text file as a
    whole; text formats may also be `.gz`, `.zst`, `.xz` or `.bz2`. A directory means every text file below it, sorted. A file
    at a URL is fetched once, during preparation. The query of a URL, such as a signature, is written nowhere; with another
    query it is the same file as long as size and ETag stay the same."""
    grows_until: str | None = None
    """With `path`, one local directory that is still being filled: files are taken in the order of their names as they come,
    until a file of this name exists, such as _SUCCESS. Begin the name of an unfinished file with a dot."""
    hub: str | None = None
    """A dataset on the Hugging Face hub by name (org/name), streamed once, during preparation; or a local directory that the
    library `datasets` knows: the output of `save_to_disk`, or data files."""
    subset: str | None = None
    """With `hub`: the dataset's configuration, such as wikitext-103-raw-v1. If not given: the only one, or `default`."""
    split: str | None = None
    """With `hub`: the split; train if not given."""
    revision: str | None = None
    """With a hub name: the branch, tag or full commit to take; main if not given. prepared.json keeps the commit that it
    pointed to, until the preparation is deleted or another revision is named."""
    builtin: Literal["python-stdlib"] | None = None
    """`python-stdlib`: the sources of the running Python's own standard library, without its tests."""
    format: Format = "text"
    """What a row is. text: a document. chat: a conversation, as `messages` (a list of role and content) or as `prompt` and
    `completion`; the tokenizer's chat template writes it, and only what the assistant says is learned, each answer by its
    `weight` (0 to 1); `prepare` counts reasoning and calls that the template does not write. preference: two answers to one
    prompt, as `chosen` and `rejected` (texts, or lists of messages) and `prompt`; if that is missing, it is the common
    beginning of both; `objective.kind: dpo` trains on them. tokens: ids that `data.tokenizer.from` made before, in local files:
    a directory of MosaicML's shards (MDS), Megatron-LM's .bin with .idx, or raw .bin."""
    file_format: Kind | None = None
    """With `path`: the format of the files, if their names do not say it. jsonl: JSON lines. json: an array, lines, or one
    object. csv, tsv, parquet, arrow: columns. text: one document each. The name always determines the compression. With
    `format: tokens`: mds, megatron, or bin, which reads a .bin as raw ids even if an .idx is beside it."""
    id_type: IdType | None = None
    """With `format: tokens`: the type of an id where the files do not record it: in a raw .bin, and in a column of bytes in MDS
    (there int64 if not given, as LLM Foundry writes it)."""
    stored: Stored | None = None
    """With `format: tokens`: how the files store documents. stream: rows are joined, and EOS ends a document. documents: the
    end of a row ends one too. samples: each row is one sample as it is stored, neither joined nor cut. If not given: documents
    for Megatron-LM's files, whose index has them, else stream."""
    max_row_mib: int = Field(default=MAX_ROW_MIB, ge=1, le=1 << 20)
    """Largest row in MiB (a line of JSON, a whole text file), unpacked; a larger row is an error that names it."""
    too_long: TooLong | None = None
    """With `format: chat` or `preference`: what happens to a conversation, or an answer with its prompt, that is longer than a
    sequence; an answer is never cut. refuse (if not given): an error names the length that holds all. drop: it is left out and
    counted. cut-prompt, for chat: messages other than answers lose their middle, the longest most, and keep the template's
    marks, their beginning and their end; a conversation that is still too long is left out; `prepare` counts both."""
    bad_rows: BadRowsConfig = BadRowsConfig()
    """What happens to rows that are not documents."""
    filters: FiltersConfig | None = None
    """Leave out documents because of their content. In a conversation the words of all messages count, with a line break
    between two. `rows` and `documents` count before filters, `tokens` after them."""
    fill_in_middle: FillInMiddleConfig | None = None
    """Move the middle of some training texts to their end, for models that complete code between two texts."""
    text: str | None = None
    """The key of a row of JSON, or the column of a table or of a dataset, that holds the document; `text` if not given. Dots
    name a nested key: meta.text. With `format: tokens`: the column of ids in MDS; tokens, or else input_ids, if not given."""
    rows: (
        Annotated[Annotated[str, Tag("text")] | Annotated[RowsConfig, Tag("mapping")], Discriminator(_text_or_mapping)]
        | None
    ) = None
    """A slice of the rows (lines of JSON, rows of tables and of datasets, whole text files) as first:end, counted from 0:
    "1000:50000", "1000:", ":50000". Empty and bad rows count; blank lines do not. Or where a row has its conversation (chat)
    or its prompt (preference): messages, sharegpt, alpaca, prompt-completion, or the row's own names."""
    documents: Count | None = Field(default=None, ge=1, le=MOST_ROWS)
    """The largest number of documents (rows that hold text) to take, from the first on."""
    tokens: Count | None = Field(default=None, ge=1, le=MOST_ROWS)
    """Approximate number of tokens to take for training: this source's training text ends with the document that reaches it."""
    weight: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Share of this source in the training stream, relative to the weights of the others. Give one to all sources or to none:
    without weights, sources are read one after the other."""
    name: str | None = Field(default=None, min_length=1)
    """The source's name in messages and `data.stages`; its path or name on the hub if not given."""

    @field_validator("format", mode="before")
    @classmethod
    def _no_file_format(cls, given: object) -> object:
        if given in ("jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow"):
            rule = "`format` says what a row is, and this is what a file is"
            change = f"set .file_format={'jsonl' if given == 'ndjson' else given} in its place"
            raise BrokenRule({"format": given}, rule, change)
        return given

    def rules(self) -> Sequence[Iterator[BrokenRule]]:
        begin = (self._one_kind(), self._credentials(), self._keys(), self._filters())
        return (*begin, self._hub(), self._growing(), self._rows(), self._tokens())

    def _one_kind(self) -> Iterator[BrokenRule]:
        yield from (wrong := list(self.exactly_one("a source", "path", "hub", "builtin")))
        if not wrong and (self.hub == "" or not all(self.paths or [self.builtin or self.hub])):
            key = "hub" if self.path is None else "path"
            change = f"give a file, a directory, a glob or a name as .{key}"
            yield BrokenRule({key: getattr(self, key)}, f"`{key}` names the documents, and is empty", change)

    def _credentials(self) -> Iterator[BrokenRule]:
        for path in self.paths:
            without = re.sub("://[^/]*@", f"://{HIDDEN}@", path)
            if without != path and not path.startswith(("hf://", "http://", "https://")):
                rule = "only an http server takes a user or password in a URL"
                change = "give the bare URL as .path, and credentials in the environment"
                yield BrokenRule({"path": without}, rule, change)

    def _keys(self) -> Iterator[BrokenRule]:
        row = {"format": self.format}
        if self.file_format is not None and not self.paths:
            rule = "it says how files of `path` are read, and has no effect without them"
            yield BrokenRule({"file_format": self.file_format, "path": self.path}, rule, "remove .file_format")
        if self.builtin is not None and self.text is not None:
            rule = "it names a key or a column, and has no effect on `builtin`, which has none"
            yield BrokenRule({"text": self.text, "builtin": self.builtin}, rule, "remove .text")
        elif self.format in HELD and (self.text is not None or self.builtin is not None):
            key = "text" if self.text is not None else "builtin"
            rule = f"rows of this format hold {HELD[self.format]}, and `{key}` has no effect on them"
            yield BrokenRule({key: getattr(self, key), **row}, rule, f"remove one of the two: .{key} or .format")
        if self.too_long is not None and self.format not in HELD:
            rule = "it is for chat and preference, and has no effect on this format, whose documents may be cut"
            yield BrokenRule({"too_long": self.too_long, **row}, rule, "remove .too_long")
        elif self.too_long == "cut-prompt" and self.format == "preference":
            rule = "cut-prompt is for chat; nothing of a pair is cut"
            yield BrokenRule({"too_long": self.too_long, **row}, rule, "set .too_long=drop, or remove .too_long")

    def _filters(self) -> Iterator[BrokenRule]:
        row = {"format": self.format}
        if self.filters is not None and self.format not in ("text", "chat"):
            rule = "filters look at texts or conversations"
            yield BrokenRule({"filters": self.filters, **row}, rule, "remove .filters")
        if self.fill_in_middle is not None and self.format != "text":
            rule = "only texts have a middle that is moved"
            yield BrokenRule({"fill_in_middle": self.fill_in_middle, **row}, rule, "remove .fill_in_middle")

    def _hub(self) -> Iterator[BrokenRule]:
        for name in ("subset", "split", "revision"):
            if self.hub is None and (value := getattr(self, name)) is not None:
                rule = "it is for a dataset of `hub`, and has no effect without one"
                yield BrokenRule({name: value, "hub": None}, rule, f"remove .{name}")
        if self.hub is not None and self.revision is not None and not NAME.fullmatch(self.hub):
            rule = "only a name of the hub (org/name) has revisions"
            yield BrokenRule({"revision": self.revision, "hub": self.hub}, rule, "remove .revision")
        if self.hub is not None and "://" in self.hub:
            rule = "`hub` is a dataset's name (org/name), and this is a URL"
            yield BrokenRule({"hub": self.hub}, rule, "give it as .path")

    def _growing(self) -> Iterator[BrokenRule]:
        if self.grows_until is None:
            return
        if len(self.paths) != 1 or "://" in self.paths[0] or any(letter in self.paths[0] for letter in "*?["):
            rule = "what grows is one local directory"
            yield BrokenRule({"grows_until": self.grows_until, "path": self.path}, rule, "give one as .path")
        if not self.grows_until or "/" in self.grows_until:
            rule = "it is the name of a file, which says that the directory is complete"
            yield BrokenRule({"grows_until": self.grows_until}, rule, "give a file's name: .grows_until=_SUCCESS")

    def _rows(self) -> Iterator[BrokenRule]:
        rows, key = self._slice_text, "rows.slice" if isinstance(self.rows, RowsConfig) else "rows"
        if self.shape is not None and self.format not in HELD:
            rule = "it says where a conversation is, and has no effect on rows of this format"
            yield BrokenRule({"rows": self.rows, "format": self.format}, rule, "set .format=chat, or remove .rows")
        elif isinstance(self.rows, RowsConfig):
            yield from self.rows.errors_of_chat() if self.format == "chat" else self.rows.errors_of_pairs()
        if rows is None:
            return
        found = SLICE.fullmatch(rows)
        numbers = [] if found is None else [number.lstrip("0") for number in found.groups()]
        if any(len(number) >= len(str(MOST_ROWS)) for number in numbers):
            rule = f"it counts to {MOST_ROWS} or more, beyond the rows of any source"
            yield BrokenRule({key: rows}, rule, f"correct .{key}")
        elif found is None or rows == ":" or (found[2] and int(found[2]) <= int(found[1] or 0)):
            change = f"write one, as in .{key}=1000:50000; or for chat one of {', '.join(SHAPES)}"
            yield BrokenRule({key: rows}, "a slice is first:end, and has at least one row", change)

    def _tokens(self) -> Iterator[BrokenRule]:
        row = {"format": self.format}
        if self.format != "tokens":
            rule = "it is for files of tokens, and has no effect on rows of this format"
            for name in ("id_type", "stored", "file_format"):
                value = getattr(self, name)
                if value is not None and (name != "file_format" or value in TOKENS_KINDS):
                    yield BrokenRule({name: value, **row}, rule, f"set .format=tokens, or remove .{name}")
            return
        if self.path is None or self.grows_until is not None or any("://" in path for path in self.paths):
            names = ("path", "hub", "builtin", "grows_until")
            given = row | {name: value for name in names if (value := getattr(self, name)) is not None}
            change = "copy them here, and name them as .path"
            yield BrokenRule(given, "ids are read from whole files on this host", change)
        if self.file_format is not None and self.file_format not in TOKENS_KINDS:
            rule = f"a file of this format holds text, and ids are in {', '.join(TOKENS_KINDS)}"
            change = "set .file_format to one of those, or remove it"
            yield BrokenRule({"file_format": self.file_format, **row}, rule, change)
        if self.bad_rows != BadRowsConfig():
            rule = "an id is right or wrong, and the setting has no effect"
            yield BrokenRule({"bad_rows": self.bad_rows, **row}, rule, "remove .bad_rows")

    @property
    def text_key(self) -> str:
        """The key or column of a row that holds the document; CONVERSATION or PAIR where several do."""
        return HELD.get(self.format) or self.text or "text"

    @property
    def paths(self) -> list[str]:
        if self.path is None:
            return []
        return [self.path] if isinstance(self.path, str) else self.path

    @property
    def avoided_paths(self) -> list[str]:
        """Paths of the texts that no document may share an n-gram with."""
        return [] if self.filters is None or self.filters.decontaminate is None else self.filters.decontaminate.paths

    @property
    def slice(self) -> tuple[int, int | None]:
        """`rows` as numbers: first row, and the row behind the last."""
        first, _, end = (self._slice_text or "0:").partition(":")
        return int(first or 0), int(end) if end else None

    @property
    def _slice_text(self) -> str | None:
        if isinstance(self.rows, RowsConfig):
            return self.rows.slice
        return None if self.rows in SHAPES else self.rows

    @property
    def shape(self) -> RowsConfig | None:
        """Where a conversation is in a row; None under the usual names."""
        found = self.rows if isinstance(self.rows, RowsConfig) else SHAPES.get(self.rows or "")
        return SHAPES[found.shape] if found is not None and found.shape is not None else found

    @property
    def label(self) -> str:
        """The source in a sentence."""
        if self.name is not None:
            return self.name
        name = redacted(self.hub or self.builtin or ", ".join(self.paths))
        return name if self.subset is None else f"{name} ({self.subset})"
