"""Checks on the tokenizer of a preparation: its EOS, and whether it is the one that a model was trained with."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from windlass.data.lint.check_ids import Vocabulary
from windlass.data.lint.findings import Findings
from windlass.data.prepare.manifest import Prepared
from windlass.data.tokenize.tokenizer import CONFIG_FILE, TOKENIZER_FILE, open_tokenizer

MODEL_FILES = ("generation_config.json", "config.json")  # the first that names an EOS


def open_vocabulary(prepared: Prepared) -> tuple[Tokenizer, Vocabulary]:
    """The open tokenizer, and what the checks need of it. Raises UserError."""
    tokenizer, eos_id = open_tokenizer(prepared.tokenizer_directory)
    config = json.loads((prepared.tokenizer_directory / CONFIG_FILE).read_bytes())
    bos = config.get("bos_token")
    bos = bos.get("content") if isinstance(bos, dict) else bos
    bos_id = tokenizer.token_to_id(bos) if isinstance(bos, str) else None
    added = tokenizer.get_added_tokens_decoder()
    specials = {number: token.content for number, token in added.items() if token.special}
    return tokenizer, Vocabulary(prepared.vocab_size, prepared.eos_id, eos_id, bos_id, specials)


def check_eos(found: Findings, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """A finding where the preparation ends documents by another token than its tokenizer."""
    if vocabulary.tokenizers_eos_id != vocabulary.eos_id:
        ours, theirs = (_named(tokenizer, number) for number in (vocabulary.eos_id, vocabulary.tokenizers_eos_id))
        found.add("eos-of-another", f"prepared.json ends documents by {ours}, the tokenizer by {theirs}")


def _named(tokenizer: Tokenizer, number: int) -> str:
    return f"{tokenizer.id_to_token(number)} (id {number})"


def check_model(found: Findings, prepared: Prepared, tokenizer: Tokenizer, model: Path) -> None:
    """Findings where the data was not made with the tokenizer in the directory `model`. One may have more tokens than the other,
    as long as each id is the same token in both."""
    if (model / TOKENIZER_FILE).is_file():
        ours = tokenizer.get_vocab(with_added_tokens=True)
        theirs = {
            number: token for token, number in Tokenizer.from_file(str(model / TOKENIZER_FILE)).get_vocab().items()
        }
        others = {number: token for token, number in ours.items() if theirs.get(number, token) != token}
        if others:
            number = min(others)
            what = f"{len(others):,} of {len(ours):,} ids are other tokens than in {model}, the first is {number}: "
            found.add("tokenizer-of-another-model", f"{what}{others[number]!r} here, {theirs[number]!r} there")
            return
    ends = _ends_of(model)
    if ends and prepared.eos_id not in ends:
        known = ", ".join(_named(tokenizer, number) for number in ends)
        what = f"documents end by {_named(tokenizer, prepared.eos_id)}, the model's text by {known}"
        found.add("model-ends-otherwise", what)


def _ends_of(model: Path) -> list[int]:
    for name in MODEL_FILES:
        if (model / name).is_file():
            value: Any = json.loads((model / name).read_bytes()).get("eos_token_id")
            if value is not None:
                return [value] if isinstance(value, int) else list(value)
    return []
