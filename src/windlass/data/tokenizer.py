"""The tokenizer of a preparation: trained here or loaded, and how many bytes of text each token stands for.

Training: byte-level BPE (Sennrich et al., arXiv 1508.07909; on bytes: GPT-2) with GPT-2's pre-tokenisation, so any
text can be encoded and decoded without loss. `<|endoftext|>` is its end-of-sequence token (EOS) and its only special
token.

A special token written inside a document (`<|endoftext|>` in a file about tokenizers) is text: the tokenizer is told
so, because otherwise the document would end there. Truncation and padding that a tokenizer.json may carry are
switched off.

Bytes of tokens: in a byte-level vocabulary each character of a token's name is one byte. In a SentencePiece
vocabulary `<0x41>` is one byte and `▁` is a space. Special tokens stand for no text: 0. Summed over a stream this is
the length of the text, exactly, unless the tokenizer rewrites text (Unicode normalisation, an added first space);
preparation compares.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from windlass.errors import UserError

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
COPIED_FILES = (TOKENIZER_FILE, CONFIG_FILE, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
NO_LIMIT = 10**30  # transformers' own value for `model_max_length` where there is none
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of `vocab_size` tokens, or fewer where the text has no more pairs to merge."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END_OF_TEXT, special=True, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_trained(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes the directory that transformers' AutoTokenizer loads."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": NO_LIMIT,
        "clean_up_tokenization_spaces": False,
    }
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / TOKENIZER_FILE))
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2))


def tokenizer_files(given: str) -> list[Path]:
    """The files of a local tokenizer, given as `tokenizer.from`: its directory or tokenizer.json. Raises UserError."""
    path = Path(given).expanduser()
    folder = path.parent if path.is_file() else path
    rule = "a tokenizer is a local directory with tokenizer.json and tokenizer_config.json, as transformers saves it"
    save = "AutoTokenizer.from_pretrained(...).save_pretrained(directory)"
    if not folder.is_dir():
        change = f"names of the Hugging Face hub are not fetched: save it first with {save} and give that directory"
        raise UserError(f"`tokenizer.from: {given}` is neither a directory nor a file", rule, change)
    if path.is_file() and path.name != TOKENIZER_FILE:
        raise UserError(f"`tokenizer.from: {given}` is a file, but no {TOKENIZER_FILE}", rule, "give its directory")
    missing = [name for name in (TOKENIZER_FILE, CONFIG_FILE) if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} has no {' and no '.join(missing)}", rule, f"write both with {save}")
    return [folder / name for name in COPIED_FILES if (folder / name).is_file()]


def copy_loaded(files: list[Path], directory: Path) -> None:
    directory.mkdir(parents=True)
    for file in files:
        shutil.copyfile(file, directory / file.name)


def open_tokenizer(directory: Path) -> tuple[Tokenizer, int]:
    """(tokenizer, EOS id), ready to encode documents: special tokens are text, nothing is cut or padded."""
    tokenizer = Tokenizer.from_str(json.dumps(_read_json(directory / TOKENIZER_FILE, "model")))
    config = _read_json(directory / CONFIG_FILE, "eos_token")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    eos = config["eos_token"]
    eos = eos.get("content") if isinstance(eos, dict) else eos
    eos_id = tokenizer.token_to_id(eos) if isinstance(eos, str) else None
    if eos_id is None:
        rule = "documents are joined by the tokenizer's end-of-sequence token"
        change = f"set `eos_token` in {CONFIG_FILE} to a token of the vocabulary"
        raise UserError(f"{directory / CONFIG_FILE} has eos_token {eos!r}, which is no token", rule, change)
    if eos_id in tokenizer.encode(eos, add_special_tokens=False).ids:
        rule = "a special token written inside a document is text, and must not end the document"
        change = f"mark {eos!r} as special in {TOKENIZER_FILE}: set `special` to true in its entry of `added_tokens`"
        raise UserError(f"the text {eos!r} is encoded as the end-of-sequence token", rule, change)
    return tokenizer, eos_id


def _read_json(path: Path, key: str) -> dict[str, Any]:
    rule = f"{path.name} is a JSON object with the key `{key}`, as transformers saves it"
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", rule, "save the tokenizer again") from None
    if not isinstance(value, dict) or key not in value:
        raise UserError(f"{path} has no key `{key}`", rule, f"save the tokenizer again, or add `{key}`")
    return value


def vocab_size_of(tokenizer: Tokenizer) -> int:
    """Highest id + 1: ids may have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text per token id, [V] int32; 0 for special tokens (EOS among them) and for ids without a token."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet()) if _is_byte_level(tokenizer) else None
    bytes_V = np.zeros(vocab_size_of(tokenizer), np.int32)
    for token, number in tokenizer.get_vocab(with_added_tokens=False).items():
        if alphabet is not None and alphabet.issuperset(token):
            bytes_V[number] = len(token)
        elif alphabet is None and BYTE_TOKEN.fullmatch(token):
            bytes_V[number] = 1
        else:
            bytes_V[number] = len(token.replace("▁", " ").encode())
    for number, added in tokenizer.get_added_tokens_decoder().items():
        bytes_V[number] = 0 if added.special else len(added.content.encode())
    return bytes_V


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    return any(part.get("type") == "ByteLevel" for part in _parts(json.loads(tokenizer.to_str())["decoder"]))


def _parts(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is not None:
        yield decoder
        for part in decoder.get("decoders", ()):
            yield from _parts(part)
