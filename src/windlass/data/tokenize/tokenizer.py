"""The tokenizer of a preparation: trained here or loaded, and how many bytes of text each token represents.

Training: byte-level BPE (Sennrich et al., arXiv 1508.07909; on bytes: GPT-2) with GPT-2's pre-tokenisation, so any text can be
encoded and decoded without loss. `<|endoftext|>` is its end-of-sequence token (EOS) and its only special token.

A special token written inside a document (`<|endoftext|>` in a file about tokenizers) is encoded as text, because otherwise the
document would end there. Truncation and padding of a tokenizer.json are switched off.

Bytes of tokens: in a byte-level vocabulary each character of a token's name is one byte. In a SentencePiece vocabulary `<0x41>`
is one byte and `▁` is a space. Special tokens count 0 bytes. Summed over a stream this is the length of the text, exactly,
unless the tokenizer rewrites text (Unicode normalisation, an added first space); preparation compares the two.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from windlass.data.config import TokenizerConfig
from windlass.data.tokenize.end_of_text import END_OF_TEXT, NUMBERED_IN, end_of_text, read_json, states_end, write_end
from windlass.errors import UserError
from windlass.hub.client import locate

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
TEMPLATE_FILE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
COPIED_FILES = (TOKENIZER_FILE, CONFIG_FILE, "special_tokens_map.json", "added_tokens.json", TEMPLATE_FILE)
OLDER_FILES = ("tokenizer.model", "vocab.json", "merges.txt")  # beside tokenizer.json in many directories
CODE_READS = (".json", ".jinja", ".py", ".model", ".txt", ".tiktoken")  # what a tokenizer's own code may read beside it
NO_LIMIT = 10**30  # transformers' own value for `model_max_length` where there is none
HALF_CHARACTER = "\ufffd"  # what a decoder makes of bytes that are no whole character
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
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


def tokenizer_files(config: TokenizerConfig) -> list[Path]:
    """The files of `tokenizer.from`: a directory, a tokenizer.json, or a hub name whose files are in the cache; with its code
    where that is trusted. Raises UserError."""
    assert config.from_ is not None
    path = locate(config.from_, config.commit or config.revision, "data.tokenizer.from", config.hub_cache)
    folder = path.parent if path.is_file() else path
    rule = "a tokenizer is a directory with tokenizer.json and tokenizer_config.json, as transformers saves it"
    save = "AutoTokenizer.from_pretrained(...).save_pretrained(directory)"
    if not folder.is_dir():
        given = f"`tokenizer.from: {config.from_}` is neither a directory, nor a file, nor a hub name (org/name)"
        raise UserError(given, rule, f"give one of these; a directory is written by {save}")
    if path.is_file() and path.name != TOKENIZER_FILE:
        raise UserError(
            f"`tokenizer.from: {config.from_}` is a file, but no {TOKENIZER_FILE}", rule, "give its directory"
        )
    code = _own_code(folder, config)
    missing = [name for name in (TOKENIZER_FILE, CONFIG_FILE) if not (folder / name).is_file()]
    if missing and not code:
        raise UserError(f"{folder} has no {' and no '.join(missing)}", rule, f"write both with {save}")
    more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    if code:  # it may read any file beside it
        return sorted(file for file in folder.iterdir() if file.is_file() and file.suffix in CODE_READS) + more
    read_json(folder / CONFIG_FILE, None, f"{config.from_}: {CONFIG_FILE}")
    asked = () if states_end(folder) or config.eos_token is not None else NUMBERED_IN
    files = [folder / name for name in (*COPIED_FILES, *asked) if (folder / name).is_file()]
    _end_of(files, config)
    return files + more


def _end_of(files: list[Path], config: TokenizerConfig) -> tuple[str, str]:
    """(EOS token, the setting or file that names it), of a tokenizer that can be used. Raises UserError."""
    file = next(file for file in files if file.name == TOKENIZER_FILE)
    tokenizer = _parsed(file, f"{config.from_}: {TOKENIZER_FILE}")
    token, where = end_of_text(files, tokenizer, config, _is_byte_level(tokenizer))
    tokenizer.encode_special_tokens = True
    eos_id = tokenizer.token_to_id(token)
    assert eos_id is not None
    _check_no_text_ends(tokenizer, token, eos_id)
    return token, where


def _parsed(file: Path, named: str) -> Tokenizer:
    content = json.dumps(read_json(file, "model", named))
    try:
        return Tokenizer.from_str(content)
    except Exception as error:  # the library raises nothing narrower
        rule = f"{TOKENIZER_FILE} is one that the installed `tokenizers` reads"
        raise UserError(
            f"{named} cannot be read: {error}", rule, "save the tokenizer again, or update tokenizers"
        ) from None


def _own_code(folder: Path, config: TokenizerConfig) -> str | None:
    """The class that a tokenizer brings as Python code, where the recipe trusts it; None without one. Raises UserError."""
    if not (folder / CONFIG_FILE).is_file():
        return None
    named = read_json(folder / CONFIG_FILE, None).get("auto_map", {}).get("AutoTokenizer")
    if named is None:
        if config.trust_remote_code is not None:
            raise UserError(
                f"data.tokenizer.trust_remote_code: {config.trust_remote_code}",
                f"{CONFIG_FILE} names no code of its own (auto_map.AutoTokenizer)",
                "remove the setting: nothing needs it",
            )
        return None
    code = ", ".join(filter(None, named)) if isinstance(named, list) else str(named)
    if config.trust_remote_code is None:
        raise UserError(
            f"`tokenizer.from: {config.from_}` brings code of its own, which would run here: {code}",
            "code from elsewhere runs only where the recipe trusts it by name",
            f"read it in {folder}; then set data.tokenizer.trust_remote_code: {config.from_}",
        )
    return code


def copy_loaded(
    files: list[Path], config: TokenizerConfig, directory: Path, log: Callable[[str], None] = print
) -> None:
    """Writes the tokenizer's files. Trusted code builds its tokenizer once, which is saved as transformers saves it. The written
    tokenizer_config.json names the EOS token, wherever that was found; `log` is called with a line about it."""
    directory.mkdir(parents=True)
    if config.trust_remote_code is None:
        for file in files:
            if file.name not in NUMBERED_IN and file.parent.name != MORE_TEMPLATES:
                shutil.copyfile(file, directory / file.name)
        _join_templates(directory, [file for file in files if file.parent.name == MORE_TEMPLATES])
        found_in = files
    else:
        _save_made(files, config, directory)
        _join_templates(directory, sorted((directory / MORE_TEMPLATES).glob("*.jinja")))
        shutil.rmtree(directory / MORE_TEMPLATES, ignore_errors=True)
        beside = [file for file in files if file.name in NUMBERED_IN]
        found_in = [*(path for path in directory.iterdir() if path.name not in NUMBERED_IN), *beside]
    token, where = _end_of(found_in, config)
    if where != CONFIG_FILE:
        log(f"tokenizer: documents end by {token!r}, named by {where}; {CONFIG_FILE} of {config.from_} does not say it")
        write_end(directory, token)


def _join_templates(directory: Path, more: list[Path]) -> None:
    """Named templates as tokenizer_config.json holds them, beside that of chat_template.jinja: a tokenizer's files are in one
    directory. As transformers does, where there are such files it reads no template of tokenizer_config.json."""
    if more:
        config, default = read_json(directory / CONFIG_FILE, None), directory / TEMPLATE_FILE
        named = {"default": default} if default.is_file() else {}
        named |= {file.stem: file for file in more}
        config["chat_template"] = [{"name": name, "template": at.read_text("utf-8")} for name, at in named.items()]
        (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2, ensure_ascii=False), "utf-8")
        default.unlink(missing_ok=True)


def _save_made(files: list[Path], config: TokenizerConfig, directory: Path) -> None:
    from transformers import AutoTokenizer

    made: Any = AutoTokenizer.from_pretrained(files[0].parent, trust_remote_code=True)
    if not made.is_fast:
        raise UserError(
            f"`tokenizer.from: {config.from_}`: {type(made).__name__} is Python only",
            "data is encoded by a tokenizer that can be written as tokenizer.json",
            "take a model with a tokenizer.json, or train one: tokenizer: {train: N}",
        )
    made.save_pretrained(directory)
    config_file = directory / CONFIG_FILE
    saved = json.loads(config_file.read_text("utf-8"))
    saved.pop("auto_map", None)  # the saved tokenizer needs its code no more
    saved["tokenizer_class"] = "PreTrainedTokenizerFast"
    config_file.write_text(json.dumps(saved, indent=2), "utf-8")
    for file in directory.glob("*.py"):
        file.unlink()


def export_tokenizer(source: Path, target: Path, max_positions: int, *, with_merges: bool) -> bool:
    """The tokenizer of `source` as other tools read it -> whether there is one. The chat template is in a file of its own
    (current tools) and in tokenizer_config.json (older ones), the longest input is the model's where none was said, and
    `with_merges` adds vocab.json and merges.txt, the only form that GPT-2's own tools know."""
    for name in (*COPIED_FILES, *OLDER_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if not (target / TOKENIZER_FILE).is_file() or not (target / CONFIG_FILE).is_file():
        return False
    config, template = read_json(target / CONFIG_FILE, None), target / TEMPLATE_FILE
    if template.is_file():
        config["chat_template"] = template.read_text("utf-8")
    elif isinstance(config.get("chat_template"), str):
        template.write_text(config["chat_template"], "utf-8")
    if (config.get("model_max_length") or NO_LIMIT) >= NO_LIMIT:
        config["model_max_length"] = max_positions
    (target / CONFIG_FILE).write_text(json.dumps(config, indent=2, ensure_ascii=False), "utf-8")
    tokenizer = Tokenizer.from_file(str(target / TOKENIZER_FILE))
    if with_merges and isinstance(tokenizer.model, models.BPE):
        tokenizer.model.save(str(target))
    return True


def open_tokenizer(directory: Path) -> tuple[Tokenizer, int]:
    """(tokenizer, EOS id), ready to encode documents: special tokens are text, nothing is cut or padded."""
    tokenizer = _parsed(directory / TOKENIZER_FILE, str(directory / TOKENIZER_FILE))
    config = read_json(directory / CONFIG_FILE, "eos_token")
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
    _check_no_text_ends(tokenizer, str(eos), eos_id)
    return tokenizer, eos_id


def _check_no_text_ends(tokenizer: Tokenizer, eos: str, eos_id: int) -> None:
    """Raises UserError where ordinary text can encode to the token, alone or inside a word."""
    rule = "a special token written inside a document is text, and must not end the document"
    if eos_id in tokenizer.encode(eos, add_special_tokens=False).ids:
        change = f"mark {eos!r} as special in {TOKENIZER_FILE}: set `special` to true in its entry of `added_tokens`"
        raise UserError(f"the text {eos!r} is encoded as the end-of-sequence token", rule, change)
    added = tokenizer.get_added_tokens_decoder().get(eos_id)
    if added is not None and added.special:
        return
    text = tokenizer.decode([eos_id], skip_special_tokens=False)
    probes = tokenizer.encode_batch([text, text + text], add_special_tokens=False)
    is_half = HALF_CHARACTER in text and HALF_CHARACTER not in eos
    if is_half or any(eos_id in probe.ids for probe in probes):
        decoded = "part of a character" if is_half else f"the text {text!r}"
        given = f"the end-of-sequence token {eos!r} decodes to {decoded}, which documents hold"
        raise UserError(given, rule, "set data.tokenizer.eos_token to a special token of the vocabulary")


def vocab_size_of(tokenizer: Tokenizer) -> int:
    """Highest id + 1: ids may have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def num_entries(config: TokenizerConfig) -> int | None:
    """Rows that a model needs for the tokenizer; None where only code beside its files knows. Raises UserError."""
    if config.from_ is None:
        return config.train
    file = next((file for file in tokenizer_files(config) if file.name == TOKENIZER_FILE), None)
    has_code = config.trust_remote_code is not None
    return None if file is None or has_code else vocab_size_of(_parsed(file, f"{config.from_}: {TOKENIZER_FILE}"))


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
