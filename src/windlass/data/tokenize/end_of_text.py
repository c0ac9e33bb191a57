"""Which token ends a document (EOS), where a tokenizer's files name it in one of several places, or nowhere.

In this order: the recipe's `eos_token`; `eos_token` of tokenizer_config.json; that of special_tokens_map.json; `eos_token_id` of
the model's config.json and generation_config.json beside it; and `<|endoftext|>`, if it is the only added token of a byte-level
vocabulary. So GPT-2's own repository, whose tokenizer_config.json holds only a length, is read as its authors meant it. A token
found outside tokenizer_config.json is logged and written there.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from windlass.data.config import TokenizerConfig
from windlass.errors import UserError

END_OF_TEXT = "<|endoftext|>"
STATED_IN = ("tokenizer_config.json", "special_tokens_map.json")
NUMBERED_IN = ("config.json", "generation_config.json")
SHOWN = 5  # special tokens that a message names


def states_end(directory: Path) -> bool:
    """Whether tokenizer_config.json names the EOS token."""
    return _stated(directory / STATED_IN[0]) is not None


def end_of_text(
    files: Sequence[Path], tokenizer: Tokenizer, config: TokenizerConfig, is_byte_level: bool
) -> tuple[str, str]:
    """(the token, the setting or file that names it). Raises UserError where nothing names it, or the vocabulary lacks it."""
    by_name = {file.name: file for file in files}
    if config.eos_token is not None:
        return _checked(config.eos_token, tokenizer, f"data.tokenizer.eos_token: {config.eos_token}"), "the recipe"
    for name in STATED_IN:
        stated = _stated(by_name[name]) if name in by_name else None
        if stated is not None:
            return _checked(stated, tokenizer, f"{config.from_}: {name} has eos_token {stated!r}"), name
    for name in NUMBERED_IN:
        token = _numbered(by_name[name], tokenizer) if name in by_name else None
        if token is not None:
            return token, f"eos_token_id of {name}"
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    if is_byte_level and added == [END_OF_TEXT]:
        return END_OF_TEXT, "its only added token"
    has = f"; those added to it are {', '.join(map(repr, added[:SHOWN]))}" if added else ""
    raise UserError(
        f"data.tokenizer.from: {config.from_} names no end-of-sequence token ({', '.join(STATED_IN + NUMBERED_IN)})",
        "documents are joined by the tokenizer's end-of-sequence token",
        f"set data.tokenizer.eos_token to a token of its vocabulary{has}",
    )


def write_end(directory: Path, token: str) -> None:
    """Writes the EOS token into the copied files, as transformers does. A tokenizer that left its class to a model's config.json
    is read from tokenizer.json alone from now on."""
    for name in STATED_IN:
        file = directory / name
        if name == STATED_IN[0] or (file.is_file() and _stated(file) is not None):
            content = read_json(file)
            content["eos_token"] = token
            if name == STATED_IN[0]:
                content.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
            file.write_text(json.dumps(content, indent=2, ensure_ascii=False), "utf-8")


def read_json(path: Path, key: str | None = None, named: str | None = None) -> dict[str, Any]:
    """The object that `path` holds; `key` must be in it. `named`: the file, for messages. Raises UserError."""
    rule = f"{path.name} is a JSON object" + (f" with the key `{key}`" if key else "") + ", as transformers saves it"
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{named or path} cannot be read: {error.strerror}", rule, "fix its permissions") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{named or path} is not JSON: {error}", rule, "save the tokenizer again") from None
    if not isinstance(value, dict) or (key is not None and key not in value):
        missing = f"has no key `{key}`" if key else "is no object"
        raise UserError(f"{named or path} {missing}", rule, "save the tokenizer again, or add it")
    return value


def _stated(file: Path) -> str | None:
    stated = read_json(file).get("eos_token")
    stated = stated.get("content") if isinstance(stated, dict) else stated
    return stated if isinstance(stated, str) else None


def _numbered(file: Path, tokenizer: Tokenizer) -> str | None:
    """The token of `eos_token_id`, of several the first."""
    number: Any = read_json(file).get("eos_token_id")
    number = number[0] if isinstance(number, list) and number else number
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        return None
    token: str | None = tokenizer.id_to_token(number)
    return token


def _checked(token: str, tokenizer: Tokenizer, given: str) -> str:
    if tokenizer.token_to_id(token) is None:
        raise UserError(
            f"{given}, which is no token of the vocabulary",
            "documents are joined by the tokenizer's end-of-sequence token",
            "set data.tokenizer.eos_token to a token of the vocabulary",
        )
    return token
