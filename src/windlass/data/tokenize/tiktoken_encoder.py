"""Byte-level BPE by tiktoken: the tokenizer's own ids, several times as fast, or not at all.

tiktoken takes the regular expression that cuts words and a rank for every token, and knows nothing else. So a tokenizer qualifies
if it is only that: a BPE over all 256 bytes, words cut by one expression, no normaliser, no prefix, no dropout. Added tokens that
are not special (Qwen's `<tool_call>`) are found first, as in the tokenizer, and the text between them is encoded. Special tokens
written inside a document are text, as everywhere here.

Reading the code does not prove that two programs agree. `fast_encoder` compares their ids on a sample of the documents and on
strings that a sample seldom holds: every special token, alone and inside words, odd spaces, digits, line ends, marks. During
encoding, pool.py encodes one piece of every eighth batch with both.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from windlass.data.tokenize.tokenizer import TOKENIZER_FILE, open_tokenizer

WORDS: Final = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # ByteLevel's own: GPT-2's
SAMPLE_CHARS: Final = 1 << 20
ODD: Final = (
    "a  b   c\td\r\ne\n\n\nf \n g\u00a0h\u2003i\u3000j\u0085k\u2028l\u200bm\ufeffn\x00o\x1cp\u180eq",
    "don't DON'T we'll I'd y'all's 'tis ’twas 1234567 ١٢٣ Ⅷ ½ x² 3.14e-10 0xFF",
    "naïve e\u0301 北京 Ω🪝👩‍👩‍👧 हिन्दी ภาษาไทย İstanbul ǅ ﬁ \U0001d54f \ud7ff \U0010ffff",
    "  leading", "trailing  ", "\n", " ", "\t\t", " " * 300, "\n" * 300, "a" * 5000, "(" * 700, "=-" * 400, "'", "''s", "s'",
)  # fmt: skip


class Unfit(NamedTuple):
    """Why tiktoken cannot encode for a tokenizer."""

    reason: str


Encode = Callable[[str], np.ndarray]
"""Text -> ids [N], int32."""


def compile_bpe(directory: Path) -> Encode | Unfit:
    """The tokenizer in `directory` as tiktoken encodes it, unchecked; or why it cannot be."""
    try:
        import tiktoken
    except ImportError:
        return Unfit("tiktoken is not installed (pip install 'windlass-lm[fast-tokenize]')")
    content = json.loads((directory / TOKENIZER_FILE).read_bytes())
    model = content["model"]
    reason = _unfit(content, model)
    pattern = _pattern(content.get("pre_tokenizer"))
    if reason is not None or pattern is None:
        return Unfit(reason or "its words are not cut by one regular expression")
    tokens = _tokens_in_order(model)
    if tokens is None:
        return Unfit("its vocabulary lacks single bytes or a token of its merges")
    ids_R = np.array([number for _, number in tokens], np.int32)  # by rank
    core = tiktoken.Encoding(
        directory.name, pat_str=pattern, mergeable_ranks={name: rank for rank, (name, _) in enumerate(tokens)}, special_tokens={}
    )  # fmt: skip
    added = {token["content"]: token["id"] for token in content.get("added_tokens", []) if not token["special"]}

    def plain(text: str) -> np.ndarray:
        return ids_R[np.array(core.encode_ordinary(text), np.int64)]

    if not added:
        return plain
    finder = re.compile("(" + "|".join(re.escape(name) for name in sorted(added, key=len, reverse=True)) + ")")

    def around(text: str) -> np.ndarray:
        parts = finder.split(text)  # text and added tokens in turn
        found = [np.array([added[part]], np.int32) if at % 2 else plain(part) for at, part in enumerate(parts) if part]
        return np.concatenate([np.empty(0, np.int32), *found])

    return around


def _unfit(content: dict[str, Any], model: dict[str, Any]) -> str | None:
    if model.get("type") != "BPE":
        return f"its model is {model.get('type')}, not byte-level BPE"
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "fuse_unk"):
        if model.get(key):
            return f"its BPE has {key}"
    if content.get("normalizer") is not None:
        return f"it normalises text ({content['normalizer'].get('type')})"
    for token in content.get("added_tokens", []):
        if not token["special"] and (token["lstrip"] or token["rstrip"] or token["single_word"]):
            return f"its added token {token['content']!r} strips spaces or asks for a whole word"
    return None


def _pattern(cutter: dict[str, Any] | None) -> str | None:
    """The expression that cuts words, in either form: ByteLevel's own, or Split and then ByteLevel."""
    if cutter is None:
        return None
    steps = cutter["pretokenizers"] if cutter["type"] == "Sequence" else [cutter]
    last = steps[-1]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return WORDS if last.get("use_regex", True) else None
    first = steps[0]
    is_plain = len(steps) == 2 and first["type"] == "Split" and first["behavior"] == "Isolated" and not first["invert"]
    if not is_plain or last.get("use_regex", True) or "Regex" not in first["pattern"]:
        return None
    return str(first["pattern"]["Regex"])


def _tokens_in_order(model: dict[str, Any]) -> list[tuple[bytes, int]] | None:
    """(bytes, id) of all bytes and of each merge's result, in merge order."""
    vocabulary: dict[str, int] = model["vocab"]
    alphabet = _byte_of_letter()
    if not set(alphabet) <= set(vocabulary):
        return None
    tokens = {letter: vocabulary[letter] for letter in sorted(alphabet, key=lambda letter: vocabulary[letter])}
    for merge in model["merges"]:
        name = "".join(merge.split(" ") if isinstance(merge, str) else merge)
        if name not in vocabulary or not set(name) <= set(alphabet):
            return None
        tokens.setdefault(name, vocabulary[name])
    return [(bytes(alphabet[letter] for letter in name), number) for name, number in tokens.items()]


def _byte_of_letter() -> dict[str, int]:
    """GPT-2's letter -> byte: printable bytes are themselves, the others are numbered from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    assert set(found) == set(pre_tokenizers.ByteLevel.alphabet())
    return found


def fast_encoder(directory: Path, sample: Iterable[str], log: Callable[[str], None]) -> bool:
    """Whether tiktoken gives the ids of the tokenizer in `directory`, on a sample of documents and on odd strings; logs which."""
    found = compile_bpe(directory)
    if isinstance(found, Unfit):
        log(f"tokenizer: encoded by Hugging Face's tokenizers: {found.reason}")
        return False
    tokenizer, _ = open_tokenizer(directory)
    num_documents = num_chars = 0
    for text in (*odd_strings(tokenizer), *_first(sample)):
        num_documents, num_chars = num_documents + 1, num_chars + len(text)
        where = first_difference(tokenizer, found, text)
        if where is not None:
            log(f"tokenizer: encoded by Hugging Face's tokenizers: tiktoken differs on {where}")
            return False
    log(
        f"tokenizer: encoded by tiktoken, the same ids as the tokenizer's on {num_documents} texts ({num_chars} letters)"
    )
    return True


def _first(sample: Iterable[str]) -> Iterable[str]:
    left = SAMPLE_CHARS
    for text in sample:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def odd_strings(tokenizer: Tokenizer) -> list[str]:
    """Strings that documents seldom hold and tokenizers differ on; each added token alone, inside a word, and between spaces."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    inside = [
        form for name in added for form in (name, f"a{name}b", f" {name} {name}{name}\n", name[:-1], f"'{name}'s")
    ]
    return [text.encode(errors="ignore").decode() for text in (*ODD, *inside)]


def first_difference(tokenizer: Tokenizer, encode: Encode, text: str) -> str | None:
    """None where both give the same ids, else the text around the first that differs."""
    wanted = tokenizer.encode(text, add_special_tokens=False)
    found = encode(text).tolist()
    if found == wanted.ids:
        return None
    at = next((n for n, (a, b) in enumerate(zip(found, wanted.ids)) if a != b), min(len(found), len(wanted.ids)) - 1)
    begin = wanted.offsets[at][0] if 0 <= at < len(wanted.offsets) else 0
    return repr(text[max(0, begin - 8) : begin + 24])
