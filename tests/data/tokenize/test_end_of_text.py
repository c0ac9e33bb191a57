"""Where a tokenizer's files say how a text ends: each place in its turn, GPT-2's own repository, and what is refused."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer

from tests import tiny
from tests.data.conftest import data_config, make_text
from tests.loopback import hub as hub  # a fixture
from windlass.data.config import TokenizerConfig
from windlass.data.prepare.prepare import prepare
from windlass.data.tokenize import tokenizer as room
from windlass.errors import UserError
from windlass.hub import client as hub_room

END = "<|endoftext|>"
LENGTH_ONLY = '{"model_max_length": 1024}'  # GPT-2's own tokenizer_config.json, all of it


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """tokenizer.json as GPT-2's repository has it: a byte-level BPE, and one added token, the last."""
    directory = tmp_path_factory.mktemp("gpt2")
    content = json.loads(room.train_tokenizer([make_text(200, 1)], 300).to_str())
    assert [token["content"] for token in content["added_tokens"]] == [END]
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory / "tokenizer.json"


def directory_of(gpt2, tmp_path, add=(), **files):
    """A copy with `add`ed tokens and these files, JSON by their names without `.json`."""
    directory = tmp_path / "openai"
    directory.mkdir()
    tokenizer = Tokenizer.from_file(str(gpt2))
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in add])
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in {"tokenizer_config": json.loads(LENGTH_ONLY), **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def copied(directory, tmp_path, **settings):
    """(the token that documents end by, what was reported)"""
    config, said = TokenizerConfig(**{"from": str(directory), **settings}), []
    room.copy_loaded(room.tokenizer_files(config), config, tmp_path / "copy", said.append)
    opened, eos_id = room.open_tokenizer(tmp_path / "copy")
    assert not (tmp_path / "copy" / "config.json").exists(), "a tokenizer's directory is not a model's"
    return opened.id_to_token(eos_id), said


MORE = ("<a>", "<b>")  # then the one that is first is no answer


@pytest.mark.parametrize(
    ("files", "add", "setting", "token", "where"),
    [
        ({}, (), None, END, "its only added token"),
        ({"config": {"eos_token_id": [301, 300]}}, MORE, None, "<b>", "eos_token_id of config.json"),
        ({"config": {}, "generation_config": {"eos_token_id": 300}}, MORE, None, "<a>", "of generation_config.json"),
        (
            {"special_tokens_map": {"eos_token": {"content": "<b>"}}, "config": {"eos_token_id": 300}},
            MORE,
            None,
            "<b>",
            "map",
        ),
        ({"special_tokens_map": {"eos_token": "<b>"}}, MORE, "<a>", "<a>", "the recipe"),
        ({"tokenizer_config": {"eos_token": "<b>"}}, MORE, "<a>", "<a>", "the recipe"),
    ],
)
def test_the_end_is_looked_for_in_its_places_in_turn_and_reported(gpt2, tmp_path, files, add, setting, token, where):
    directory = directory_of(gpt2, tmp_path, add, **files)
    found, (said,) = copied(directory, tmp_path, **({} if setting is None else {"eos_token": setting}))
    assert found == token and repr(token) in said and where in said and str(directory) in said
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (tmp_path / "copy" / name).is_file():
            assert json.loads((tmp_path / "copy" / name).read_text())["eos_token"] == token
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path / "copy").eos_token == token


def test_what_tokenizer_config_says_is_copied_byte_for_byte(gpt2, tmp_path):
    said = {"eos_token": "<b>", "model_max_length": 5}
    directory = directory_of(gpt2, tmp_path, MORE, tokenizer_config=said, config={"eos_token_id": 300})
    assert copied(directory, tmp_path) == ("<b>", [])
    assert json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text()) == said
    config = TokenizerConfig(**{"from": str(directory)})
    names = [file.name for file in room.tokenizer_files(config)]
    assert "config.json" not in names, "a model's config is no part of a tokenizer that needs none of it"


def refused(directory, **settings):
    with pytest.raises(UserError) as caught:
        room.tokenizer_files(TokenizerConfig(**{"from": str(directory), **settings}))
    return caught.value


def test_an_end_that_nothing_names_is_refused_with_the_setting(gpt2, tmp_path):
    directory = directory_of(gpt2, tmp_path, MORE, config={"eos_token_id": 9999})
    error = refused(directory)
    assert f"data.tokenizer.from: {directory} names no end-of-sequence token" in error.given
    assert "set data.tokenizer.eos_token" in error.change and "'<|endoftext|>', '<a>', '<b>'" in error.change
    assert "data.tokenizer.eos_token: <z>, which is no token" in refused(directory, eos_token="<z>").given
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<y>"}')
    assert f"{directory}: tokenizer_config.json has eos_token '<y>'" in refused(directory).given


def test_an_eos_token_of_a_tokenizer_trained_here_is_refused():
    with pytest.raises(UserError, match="ends a text by"):
        TokenizerConfig(train=300, eos_token=END)


def test_gpt2s_own_repository_prepares_from_the_hub(hub, gpt2, tmp_path, corpus):
    name = "openai-community/gpt2"
    files = {"tokenizer.json": gpt2.read_bytes(), "tokenizer_config.json": LENGTH_ONLY}
    end_id = Tokenizer.from_file(str(gpt2)).token_to_id(END)
    commit = hub.add(name, {**files, "config.json": json.dumps({"model_type": "gpt2", "eos_token_id": end_id})})
    hub_room.fetch_tokenizer(name, commit)
    said = []
    prepared = prepare(data_config(tmp_path, tokenizer={"from": name, "commit": commit}), {}, said.append)
    assert prepared.eos_id == end_id == room.open_tokenizer(prepared.tokenizer_directory)[1]
    assert any("named by eos_token_id of config.json" in line and name in line for line in said)


@pytest.mark.parametrize(
    ("given", "change"), [(True, "trust_remote_code: org/name, once"), (False, "remove the setting")]
)
def test_trust_is_a_name_and_true_is_answered_with_it(tmp_path, given, change):
    tokenizer = {"train": None, "from": "org/name", "trust_remote_code": given}
    with pytest.raises(UserError) as caught:
        tiny.recipe(tmp_path, data={"tokenizer": tokenizer})
    assert "code of that repository will run here" in caught.value.rule and change in caught.value.change
