"""tiktoken gives the tokenizer's own ids, on special tokens in the text above all, or it is not used and a line says so."""

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.data.conftest import make_text
from windlass.data.tokenize import pool as encoding
from windlass.data.tokenize import tiktoken_encoder as room
from windlass.data.tokenize.tiktoken_encoder import Unfit, compile_bpe, fast_encoder, first_difference, odd_strings
from windlass.data.tokenize.tokenizer import open_tokenizer, save_trained, train_tokenizer
from windlass.errors import UserError

TEXTS = [make_text(1 + 37 * number % 400, number) for number in range(60)]
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def make(kind):
    if kind == "gpt2":
        return train_tokenizer(TEXTS[:20], 600)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True, normalized=False) for name in ("<|endoftext|>", "<|im_start|>")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS[:20], trainer)
    if kind == "added":
        tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("<tool>s"), AddedToken("rope")])
    return tokenizer


@pytest.fixture(params=["gpt2", "llama-3", "added"])
def directory(request, tmp_path):
    save_trained(make(request.param), tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_the_ids_are_the_tokenizers_own(directory):
    encode, (tokenizer, eos_id) = compile_bpe(directory), open_tokenizer(directory)
    for text in (*TEXTS, *odd_strings(tokenizer), "a <tool>s rope ropes<tool>", "<tool" * 3, ""):
        assert encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids, text
    assert eos_id not in encode("<|endoftext|> a<|endoftext|>").tolist(), (
        "a special token written in a document is text"
    )


def test_it_is_used_and_says_so(directory):
    said = []
    assert fast_encoder(directory, TEXTS, said.append)
    assert "encoded by tiktoken, the same ids as the tokenizer's on " in said[0]
    with encoding.Workers(1, encoding.Encoder, directory, True) as workers:
        fast = np.concatenate(list(workers.map(encoding.piece_batches(TEXTS))))
    assert fast.tolist() == np.concatenate(list(encoding.encode(TEXTS, 1, directory, 1))).tolist()
    assert fast.tolist() == np.concatenate(list(encoding.encode(TEXTS, 1, directory, 1, True))).tolist()


def test_special_tokens_are_among_the_odd_strings_in_every_place(directory):
    found = odd_strings(open_tokenizer(directory)[0])
    assert {"<|endoftext|>", "a<|endoftext|>b", " <|endoftext|> <|endoftext|><|endoftext|>\n"} <= set(found)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: setattr(t, "normalizer", normalizers.NFC()), "it normalises text (NFC)"),
        (lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace()), "not cut by one regular expression"),
        (lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(True)), "not cut by one regular expression"),
        (lambda t: t.add_tokens([AddedToken("<x>", lstrip=True)]), "'<x>' strips spaces"),
        (lambda t: setattr(t, "model", models.BPE({"a": 0}, [])), "lacks single bytes"),
        (lambda t: setattr(t.model, "dropout", 0.1), "its BPE has dropout"),
        (lambda t: setattr(t, "model", models.WordLevel({"a": 0}, "a")), "its model is WordLevel"),
    ],
)
def test_what_is_more_than_byte_level_bpe_is_left_to_the_tokenizer_aloud(tmp_path, change, reason):
    tokenizer = make("gpt2")
    change(tokenizer)
    save_trained(tokenizer, tmp_path / "tokenizer")
    found, said = compile_bpe(tmp_path / "tokenizer"), []
    assert isinstance(found, Unfit) and reason in found.reason
    assert not fast_encoder(tmp_path / "tokenizer", TEXTS, said.append)
    assert said == [f"tokenizer: encoded by Hugging Face's tokenizers: {found.reason}"]


def test_a_difference_is_found_by_the_strings_or_the_sample_and_said(directory, monkeypatch):
    right = compile_bpe(directory)

    def wrong_on(what):
        return lambda text: right(text)[: -1 if what in text else None]

    for what in ("<|endoftext|>", "windlass"):
        said = []
        monkeypatch.setattr(room, "compile_bpe", lambda _directory, what=what: wrong_on(what))
        assert not fast_encoder(directory, TEXTS, said.append)
        assert "tiktoken differs on " in said[0]
    monkeypatch.setattr(room, "compile_bpe", lambda _directory: wrong_on("heavy"))
    monkeypatch.setattr("windlass.data.tokenize.pool.compile_bpe", room.compile_bpe)
    assert fast_encoder(directory, TEXTS, said.append)
    with pytest.raises(UserError, match="tiktoken and the tokenizer give other ids for") as caught:
        list(encoding.encode(["a heavy text"], 1, directory, 1, True))
    assert "uninstall tiktoken" in caught.value.change


def test_without_tiktoken_the_way_to_it_is_reported(directory, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tiktoken", None)
    said = []
    assert not fast_encoder(directory, TEXTS, said.append)
    assert "pip install 'windlass-lm[fast-tokenize]'" in said[0]


def test_the_place_of_a_difference_is_shown(directory):
    tokenizer, _ = open_tokenizer(directory)
    assert first_difference(tokenizer, compile_bpe(directory), "plain") is None
    assert first_difference(tokenizer, lambda text: np.array([], np.int32), "plain text") == "'plain text'"
