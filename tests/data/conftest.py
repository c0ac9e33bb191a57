"""A small corpus with everything that goes wrong in text, and one preparation of it that all tests read."""

import random
from pathlib import Path

import pytest
from pydantic import ValidationError

from windlass.data.config import DataConfig
from windlass.data.prepare.prepare import prepare
from windlass.data.sources.known_hashes import KNOWN_NAME

WORDS = [
    *("the", "windlass", "turns", "hauls", "anchor", "rope", "naïve", "北京", "Ω", "🪝", "def", "return"),
    *("self\n\n", "\t\r\n", "<|endoftext|>", "</s>", "3.14", "==", "line\n", "a" * 40),
]


def make_text(num_words, seed):
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(num_words))


def write_corpus(directory: Path, num_documents=40, seed=0):
    """One file per document, of very different lengths (some shorter than a sequence), under two folders; one empty."""
    draw = random.Random(seed)
    texts = []
    for number in range(num_documents):
        path = directory / ("a" if number % 2 else "b") / f"{number:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = make_text(draw.choice([1, 5, 60, 400]), seed * 1000 + number) if number != 7 else ""
        path.write_bytes(text.encode())
        texts.append((path.relative_to(directory).as_posix(), text))
    return [text for _, text in sorted(texts) if text]


def data_config(root: Path, **changes):
    """The settings of the small preparation below `root`, some of them changed."""
    settings = {
        "sources": [{"path": str(root / "corpus")}],
        "tokenizer": {"train": 300},
        "directory": str(root / "data"),
        "sequence_length": 33,
        "validation": 0.2,
        "shard_bytes": 8 << 10,
        "shuffle_window": 3,
    }
    return DataConfig.model_validate({**settings, **changes})


def refusal(model, settings):
    """Where the one mistake in `settings` is, and the sentence for it: what was given, the rule, and what to change."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(settings)
    (error,) = caught.value.errors()
    return f"{'.'.join(map(str, error['loc']))}: {error['msg'].removeprefix('Value error, ')}"


@pytest.fixture
def corpus(tmp_path):
    """A fresh directory with the corpus; returns its documents in order."""
    return write_corpus(tmp_path / "corpus")


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """(config, prepared, documents): made once, read by all, changed by none."""
    directory = tmp_path_factory.mktemp("small")
    texts = write_corpus(directory / "corpus")
    config = data_config(directory)
    prepared = prepare(config, {}, log=lambda line: None)
    (prepared.directory / KNOWN_NAME).unlink(missing_ok=True)  # kept on a slow machine; what is made for a URL has none
    return config, prepared, texts
