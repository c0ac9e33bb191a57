"""Tokenizers: trained ones load in transformers, special tokens in text are text, bytes of tokens add up."""

import json
import shutil

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.data.conftest import make_text
from windlass.data.config import TokenizerConfig
from windlass.data.tokenize import tokenizer as room
from windlass.data.tokenize.template_files import reads_clock
from windlass.errors import UserError

TEXTS = [make_text(300, seed) for seed in range(5)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained") / "tokenizer"
    room.save_trained(room.train_tokenizer(TEXTS, 320), directory)
    return directory


def test_training_gives_the_asked_vocabulary_and_the_same_one_again(trained):
    opened, eos_id = room.open_tokenizer(trained)
    assert room.vocab_size_of(opened) == 320 and opened.id_to_token(eos_id) == "<|endoftext|>"
    assert room.train_tokenizer(TEXTS, 320).to_str() == Tokenizer.from_file(str(trained / "tokenizer.json")).to_str()


def test_too_little_text_gives_a_smaller_vocabulary():
    assert room.vocab_size_of(room.train_tokenizer(["aa aa"], 5000)) < 300


def test_any_text_comes_back_and_its_bytes_add_up(trained):
    opened, _ = room.open_tokenizer(trained)
    bytes_V = room.token_bytes(opened)
    for text in [*TEXTS, "\x00\x7f\u00e9\U0001fa9d\u200b", " leading and trailing ", "<|endoftext|>", "\r\n\n\n\t "]:
        ids = opened.encode(text, add_special_tokens=False).ids
        assert opened.decode(ids, skip_special_tokens=False) == text
        assert bytes_V[ids].sum() == len(text.encode())


def test_a_special_token_written_in_a_document_is_text(trained):
    opened, eos_id = room.open_tokenizer(trained)
    ids = opened.encode("before<|endoftext|>after", add_special_tokens=False).ids
    assert eos_id not in ids and room.token_bytes(opened)[eos_id] == 0
    by_default = Tokenizer.from_file(str(trained / "tokenizer.json"))
    assert eos_id in by_default.encode("before<|endoftext|>after").ids  # the trap is real


def test_transformers_loads_the_directory_and_gives_the_same_ids(trained):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(trained)
    opened, eos_id = room.open_tokenizer(trained)
    assert theirs.eos_token == "<|endoftext|>" and theirs.eos_token_id == eos_id and len(theirs) == 320
    for text in TEXTS:
        text = text.replace("<|endoftext|>", "")
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == opened.encode(text).ids and theirs.decode(ids) == text


def save(directory, tokenizer, **config):
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_truncation_padding_and_an_added_bos_are_switched_off(tmp_path, trained):
    from tokenizers.processors import TemplateProcessing

    saved = Tokenizer.from_file(str(trained / "tokenizer.json"))
    saved.add_special_tokens(["<s>"])
    saved.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", saved.token_to_id("<s>"))])
    saved.enable_truncation(4)
    saved.enable_padding(length=16)
    opened, _ = room.open_tokenizer(save(tmp_path / "t", saved, eos_token={"content": "<|endoftext|>"}))
    assert opened.encode(TEXTS[0], add_special_tokens=False).ids == room.open_tokenizer(trained)[0].encode(TEXTS[0]).ids


def test_bytes_of_a_byte_fallback_vocabulary_are_those_of_the_decoded_token():
    vocab = {"<s>": 0, "</s>": 1, "<0xE5>": 2, "▁the": 3, "é": 4, "<0xZZ>": 5, "a": 6}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert room.token_bytes(tokenizer).tolist() == [0, 0, 1, 4, 2, 6, 1, 6]


def test_ids_may_have_gaps():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "bb": 7}, unk_token="a"))
    assert room.vocab_size_of(tokenizer) == 8
    assert room.token_bytes(tokenizer).tolist() == [1, 0, 0, 0, 0, 0, 0, 2]


def test_a_tokenizer_that_rewrites_text_does_not_add_up(trained):
    opened, _ = room.open_tokenizer(trained)
    opened.normalizer = normalizers.Lowercase()
    decomposed = Tokenizer.from_str(opened.to_str())
    decomposed.normalizer = normalizers.NFC()
    ids = decomposed.encode("e\u0301").ids
    assert room.token_bytes(decomposed)[ids].sum() == 2 != len("e\u0301".encode())


def refused(call, *args):
    with pytest.raises(UserError) as caught:
        call(*args)
    return caught.value


def given(path, **more):
    return TokenizerConfig(**{"from": str(path), **more})


def test_what_is_no_tokenizer_is_named(tmp_path, trained):
    error = refused(room.tokenizer_files, given("Qwen/../Qwen3-4B"))
    assert "is neither a directory, nor a file, nor a hub name (org/name)" in error.given
    assert "save_pretrained" in error.change
    assert (
        "is neither a directory here nor in the cache"
        in refused(room.tokenizer_files, given("org/never-fetched")).given
    )
    (tmp_path / "vocab.txt").write_text("x")
    assert "has no tokenizer.json and no tokenizer_config.json" in refused(room.tokenizer_files, given(tmp_path)).given
    assert "is a file, but no tokenizer.json" in refused(room.tokenizer_files, given(tmp_path / "vocab.txt")).given
    names = [file.name for file in room.tokenizer_files(given(trained / "tokenizer.json"))]
    assert names == ["tokenizer.json", "tokenizer_config.json"]
    (tmp_path / "tokenizer.json").write_text((trained / "tokenizer.json").read_text())
    missing = refused(room.tokenizer_files, given(tmp_path / "tokenizer.json"))
    assert missing.given.endswith("has no tokenizer_config.json")


OWN_CODE = """
import pathlib
from transformers import PreTrainedTokenizerFast
pathlib.Path(__file__).with_name("ran").touch()
class Own(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def with_code(tmp_path, trained, monkeypatch):
    """A tokenizer directory whose tokenizer_config.json names a class in own.py."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    room.copy_loaded(room.tokenizer_files(given(trained)), given(trained), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["tokenizer_class"]
    config["auto_map"] = {"AutoTokenizer": [None, "own.Own"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(OWN_CODE)
    return folder


def test_code_of_a_tokenizer_runs_only_where_it_is_trusted_by_name(tmp_path, with_code, trained):
    error = refused(room.tokenizer_files, given(with_code))
    assert "brings code of its own, which would run here: own.Own" in error.given
    assert f"trust_remote_code: {with_code}" in error.change
    assert not list(tmp_path.rglob("ran"))
    trusted = given(with_code, trust_remote_code=str(with_code))
    files = room.tokenizer_files(trusted)
    assert "own.py" in [file.name for file in files], "code is part of what the data is fingerprinted by"
    room.copy_loaded(files, trusted, tmp_path / "copy")
    assert list(tmp_path.rglob("ran")), "its code made it"
    assert (
        not list((tmp_path / "copy").glob("*.py"))
        and "auto_map" not in (tmp_path / "copy" / "tokenizer_config.json").read_text()
    )
    text = "the anchor of the ship"
    ids = [room.open_tokenizer(path)[0].encode(text).ids for path in (tmp_path / "copy", trained)]
    assert ids[0] == ids[1]


def test_trust_that_nothing_needs_is_named(trained):
    error = refused(room.tokenizer_files, given(trained, trust_remote_code=str(trained)))
    assert "names no code of its own" in error.rule and "remove the setting" in error.change


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", "{", "tokenizer.json is not JSON"),
        ("tokenizer.json", "{}", "tokenizer.json has no key `model`"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json has no key `eos_token`"),
        ("tokenizer_config.json", '{"eos_token": null}', "has eos_token None, which is no token"),
        ("tokenizer_config.json", '{"eos_token": "<none>"}', "has eos_token '<none>', which is no token"),
    ],
)
def test_a_damaged_tokenizer_is_named(tmp_path, trained, name, content, says):
    room.copy_loaded(room.tokenizer_files(given(trained)), given(trained), tmp_path / "t")
    (tmp_path / "t" / name).write_text(content)
    assert says in refused(room.open_tokenizer, tmp_path / "t").given


def test_an_eos_that_text_can_produce_is_refused(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens([AddedToken("<end>", special=False)])
    error = refused(room.open_tokenizer, save(tmp_path / "t", tokenizer, eos_token="<end>"))
    assert "'<end>' is encoded as the end-of-sequence token" in error.given and "`special` to true" in error.change


@pytest.mark.parametrize(
    ("eos", "decoded"), [("Ċ", r"the text '\n'"), ("Ġt", "the text ' t'"), ("ð", "part of a character")]
)
def test_an_eos_that_is_an_ordinary_token_in_the_spelling_of_bytes_is_refused(tmp_path, trained, eos, decoded):
    saved = Tokenizer.from_file(str(trained / "tokenizer.json"))
    assert saved.token_to_id(eos) is not None
    error = refused(room.open_tokenizer, save(tmp_path / "t", saved, eos_token=eos))
    assert error.given == f"the end-of-sequence token {eos!r} decodes to {decoded}, which documents hold"
    assert error.change == "set data.tokenizer.eos_token to a special token of the vocabulary"


def test_an_eos_that_is_within_words_alone_is_refused_and_one_that_no_text_gives_is_taken(tmp_path):
    vocabulary = {
        letter: number for number, letter in enumerate(["▁", "a", "b", "</s>", "<", "/", "s", ">", "ab", "▁ab"])
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("▁", "ab")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.encode("ab").tokens == ["▁ab"] and tokenizer.encode("abab").tokens == ["▁ab", "ab"]
    error = refused(room.open_tokenizer, save(tmp_path / "t", tokenizer, eos_token="ab"))
    assert "'ab' decodes to the text 'ab', which documents hold" in error.given
    assert room.open_tokenizer(save(tmp_path / "t", tokenizer, eos_token="</s>"))[1] == vocabulary["</s>"]


def test_bytes_are_int32_and_not_negative(trained):
    bytes_V = room.token_bytes(room.open_tokenizer(trained)[0])
    assert bytes_V.dtype == np.int32 and bytes_V.min() == 0 and (bytes_V == 0).sum() == 1


@pytest.mark.parametrize("has_code", [False, True])
def test_templates_that_transformers_saves_as_several_files_are_all_kept(tmp_path, trained, with_code, has_code):
    from transformers import AutoTokenizer

    texts = {"default": "{{ messages }}", "tool_use": "{{ strftime_now('%Y') }} {{ tools }}"}
    made = AutoTokenizer.from_pretrained(trained)
    made.chat_template = texts
    made.save_pretrained(tmp_path / "saved")
    folder = with_code if has_code else tmp_path / "saved"
    for name in ("chat_template.jinja", "additional_chat_templates") if has_code else ():
        shutil.move(tmp_path / "saved" / name, folder / name)
    config = given(folder, trust_remote_code=str(folder)) if has_code else given(folder)
    files = room.tokenizer_files(config)
    assert reads_clock(files) and "tool_use.jinja" in [file.name for file in files]
    room.copy_loaded(files, config, tmp_path / "copy")
    assert all(path.is_file() for path in (tmp_path / "copy").iterdir())
    assert AutoTokenizer.from_pretrained(tmp_path / "copy").chat_template == texts
    (tmp_path / "export").mkdir()
    assert room.export_tokenizer(tmp_path / "copy", tmp_path / "export", 8, with_merges=False)
    assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template == texts
