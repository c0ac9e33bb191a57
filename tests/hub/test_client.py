"""Hub names against a hub on this machine: what is fetched and how often, what is pinned, and what every refusal says.

The real huggingface_hub asks the loopback hub; only its endpoint, its cache and its waiting between tries are set.
"""

import errno
import json
import os
import subprocess
import sys

import pytest

from tests.loopback import hub as hub  # a fixture
from windlass.errors import UserError
from windlass.hub import client as room

NAME = "org/model"
SHARDS = {"a.safetensors": b"a" * 3000, "b.safetensors": b"b" * 5000}
INDEX = json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"}})
WHOLE = {"config.json": "{}", "model.safetensors": b"w" * 200_000, "generation_config.json": '{"a": 1}'}
UNWANTED = {
    "pytorch_model.bin": b"p",
    "consolidated.safetensors": b"c",
    "original/model.safetensors": b"o",
    "onnx/model.onnx": b"x",
    "modeling_own.py": "raise SystemExit",
}
TOKENIZER = {"tokenizer.json": '{"b": 2}', "tokenizer_config.json": '{"c": 3}', "chat_template.jinja": "{{ messages }}"}


def fetch(name=NAME, revision=None):
    commit = room.resolve_commit(name, revision, report=lambda _: None)
    room.fetch_config(name, commit)
    room.fetch_weights(name, commit)
    return commit


def refused(call, *args, **more):
    with pytest.raises(UserError) as caught:
        call(*args, **more)
    return caught.value


def test_the_needed_files_are_fetched_once_and_nothing_else(hub):
    commit = hub.add(NAME, {**WHOLE, **UNWANTED, **TOKENIZER})
    assert fetch() == commit
    room.fetch_tokenizer(NAME, commit)
    directory = room.locate(NAME, commit, "model.from")
    assert sorted(path.name for path in directory.rglob("*")) == sorted({**WHOLE, **TOKENIZER})
    assert (directory / "model.safetensors").read_bytes() == WHOLE["model.safetensors"]
    for file, content in {**WHOLE, **TOKENIZER}.items():
        assert hub.served(file) == [len(content)], file
    assert not any(hub.served(file) for file in UNWANTED)


def test_what_is_there_is_not_asked_for_again(hub):
    commit = hub.add(NAME, {**WHOLE, **TOKENIZER})
    fetch()
    room.fetch_tokenizer(NAME, commit)
    hub.answers.clear()
    assert fetch(revision=commit) == commit
    room.fetch_tokenizer(NAME, commit)
    assert hub.answers == [], "a commit cannot change; not even absent files are asked for"


def test_a_branch_is_pinned_and_moves_without_its_commit(hub):
    first = hub.add(NAME, WHOLE, branch="v1")
    assert fetch(revision="v1") == first
    second = hub.add(NAME, {**WHOLE, "model.safetensors": b"new"}, branch="v1")
    assert room.resolve_commit(NAME, first) == first
    assert (room.locate(NAME, first, "model.from") / "model.safetensors").stat().st_size == 200_000
    assert fetch(revision="v1") == second
    assert (room.locate(NAME, "v1", "model.from") / "model.safetensors").read_bytes() == b"new"


def test_shards_are_those_that_the_index_names(hub):
    commit = hub.add(
        NAME, {"config.json": "{}", "model.safetensors.index.json": INDEX, **SHARDS, "c.safetensors": b"c"}
    )
    fetch()
    for file, content in SHARDS.items():
        assert hub.served(file) == [len(content)]
    assert not hub.served("c.safetensors")
    assert (room.locate(NAME, commit, "model.from") / "b.safetensors").read_bytes() == SHARDS["b.safetensors"]


def test_a_connection_that_dies_goes_on_from_the_last_byte(hub, monkeypatch):
    monkeypatch.setattr(
        "huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000
    )  # 10 MB: what it goes on from is a multiple
    hub.cut["model.safetensors"] = [70_000, 50_000]
    hub.add(NAME, WHOLE)
    commit = fetch()
    assert hub.served("model.safetensors") == [70_000, 50_000, 80_000], "the rest only"
    assert (room.locate(NAME, commit, "model.from") / "model.safetensors").read_bytes() == WHOLE["model.safetensors"]


def test_a_line_that_stays_dead_is_named_and_the_next_start_keeps_whole_files(hub):
    hub.add(NAME, {"config.json": "{}", "model.safetensors.index.json": INDEX, **SHARDS})
    hub.cut["b.safetensors"] = [0] * 6
    error = refused(fetch)
    assert f"b.safetensors of {NAME}" in error.given and "does not give it (RemoteProtocolError" in error.given
    assert "whole files stay in the cache" in error.change
    commit = fetch()
    assert hub.served("a.safetensors") == [3000] and hub.served("b.safetensors") == [5000]
    assert not list(room.locate(NAME, commit, "model.from").parents[1].rglob("*.incomplete"))


@pytest.mark.parametrize(
    ("traits", "token", "given", "change"),
    [
        ({"gated": True}, None, "org/model is gated, and no token was sent (401)", "then set HF_TOKEN"),
        ({"gated": True}, "hf_other", "the token that was sent has no access (403)", "with the token's account"),
        (
            {"private": True},
            None,
            "no repository org/model; a private one needs a token (401)",
            "for a private one set",
        ),
        ({"private": True}, "hf_other", "a private one is not shown to this token (404)", "look at http://127.0.0.1"),
        ({}, "hf_invalid", "the hub refuses (401)", "set HF_TOKEN to a valid token"),
    ],
)
def test_what_a_token_may_not_read_is_named(hub, monkeypatch, traits, token, given, change):
    hub.add(NAME, WHOLE, **traits)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    error = refused(fetch)
    assert given in error.given and change in error.change


@pytest.mark.parametrize("trait", ["gated", "private"])
def test_a_member_reads_what_is_gated_and_private(hub, monkeypatch, trait):
    commit = hub.add(NAME, WHOLE, **{trait: True})
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert fetch() == commit


def test_names_and_revisions_that_are_not_there_are_named(hub):
    hub.add(NAME, WHOLE)
    hub.moved["old/model"] = NAME
    assert "the hub has no repository org/none" in refused(fetch, "org/none").given
    error = refused(fetch, "old/model")
    assert error.given == "old/model is called org/model now" and error.change == "write org/model"
    assert "org/model has no revision v9" in refused(fetch, NAME, "v9").given
    assert f"org/model has no revision {'0' * 40}" in refused(fetch, NAME, "0" * 40).given


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"model.safetensors": b"w"}, "has no config.json"),
        ({"config.json": "{}"}, "has no model.safetensors and no model.safetensors.index.json"),
        ({"config.json": "{}", "pytorch_model.bin": b"p"}, "has pickled weights only: pytorch_model.bin"),
        (
            {"config.json": "{}", "pytorch_model.bin": b"p"},
            "AutoModelForCausalLM.from_pretrained('org/model').save_pretrained",
        ),
        ({"config.json": "{}", "model.safetensors.index.json": INDEX, "a.safetensors": b"a"}, "has no b.safetensors"),
        ({"config.json": "{}", "model.safetensors.index.json": "[]"}, "the index is JSON with a `weight_map`"),
    ],
)
def test_what_a_repository_lacks_is_named(hub, files, words):
    hub.add(NAME, files)
    assert words in str(refused(fetch))


OUTSIDE = [
    "../../x.safetensors",
    "a/../../x.safetensors",
    "/etc/passwd",
    "/x.safetensors",
    "..\\x.safetensors",
    "x.bin",
    3,
    None,
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_names_safetensors_of_its_own_directory_alone(hub, tmp_path, name):
    index = json.dumps({"weight_map": {"x": "a.safetensors", "y": name}})
    hub.add(NAME, {"config.json": "{}", "model.safetensors.index.json": index, **SHARDS})
    error = refused(fetch)
    assert f"{NAME}: model.safetensors.index.json of" in error.given and f"names {name!r}" in error.given
    assert not hub.served("a.safetensors"), "nothing large is fetched by such an index"
    (tmp_path / "index.json").write_text(index)
    assert f"names {name!r}" in refused(room.indexed_files, tmp_path / "index.json", "here", "fix").given
    (tmp_path / "index.json").write_text('{"weight_map": {"y": "sub/b.safetensors", "x": "a.safetensors"}}')
    assert room.indexed_files(tmp_path / "index.json", "", "") == ["a.safetensors", "sub/b.safetensors"]


def test_a_huge_index_is_refused_before_it_is_read(tmp_path):
    (tmp_path / "index.json").touch()
    os.truncate(tmp_path / "index.json", room.INDEX_BYTES + 1)  # sparse: it takes no space
    error = refused(room.indexed_files, tmp_path / "index.json", "here", "fix")
    assert (error.given, error.rule) == ("here has 256.0 MiB", "an index has at most 256.0 MiB")


def test_the_models_configs_come_with_its_tokenizer_and_its_card_with_its_config(hub):
    commit = hub.add(NAME, {**TOKENIZER, **WHOLE, "README.md": "---\nlicense: mit\n---\n"})
    room.fetch_tokenizer(NAME, commit)
    assert hub.served("config.json") and hub.served("generation_config.json") and not hub.served("README.md")
    room.fetch_config(NAME, commit)
    assert (room.locate(NAME, commit, "model.from") / "README.md").read_text().startswith("---")


@pytest.mark.parametrize("file", ["chat_template.jinja", "generation_config.json"])
def test_an_outage_is_never_taken_for_a_file_that_is_not_there(hub, monkeypatch, file):
    commit = hub.add(NAME, {**TOKENIZER, **WHOLE})
    hub.failing.add(file)
    call = room.fetch_tokenizer if file in TOKENIZER else room.fetch_config
    error = refused(call, NAME, commit)
    assert f"{file} of {NAME}" in error.given and "it answered 503" in error.given and error.code == 74
    assert "set HF_HUB_OFFLINE=1" in error.change
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    call(NAME, commit)  # whoever asks for no network takes what is there
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hub.failing.clear()
    call(NAME, commit)
    assert hub.served(file) == [len({**TOKENIZER, **WHOLE}[file])]


def test_a_tokenizers_code_is_fetched_where_it_is_trusted_only(hub):
    code = {"own.py": "pass", "spiece.model": b"s", "sub/own.py": "other"}
    commit = hub.add(NAME, {**TOKENIZER, **code})
    room.fetch_tokenizer(NAME, commit)
    assert not hub.served("own.py")
    room.fetch_tokenizer(NAME, commit, with_code=True)
    assert hub.served("own.py") == [4] and hub.served("spiece.model") == [1] and not hub.served("sub/own.py")
    bare = hub.add("org/bare", {"tokenizer_config.json": "{}", "spiece.model": b"s"})
    assert "has no tokenizer.json" in refused(room.fetch_tokenizer, "org/bare", bare).given
    room.fetch_tokenizer("org/bare", bare, with_code=True)


def test_without_a_network_the_cache_answers_and_says_so(hub, monkeypatch, tmp_path):
    from huggingface_hub import close_session

    commit = hub.add(NAME, WHOLE)
    fetch()
    said = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert room.resolve_commit(NAME, None, said.append) == commit
    assert said == [f"{NAME}: the hub was not asked (HF_HUB_OFFLINE is set); main is {commit[:12]} in the cache"]
    error = refused(room.resolve_commit, "org/other", None)
    assert "org/other (main) is not in the cache" in error.given and "HF_HUB_OFFLINE is set" in error.given
    assert error.change.startswith("run `windlass prepare RECIPE` where there is a network")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "others").mkdir(parents=True)
    assert refused(room.resolve_commit, "org/other", None).change.startswith("did you mean `org/others`? run ")
    assert "tokenizer.json of org/model" in refused(room.fetch_tokenizer, NAME, commit).given
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hub.down = True
    assert room.resolve_commit(NAME, None, said.append) == commit and "it answered 503" in said[1]
    assert "does not give it (it answered 503)" in refused(room.resolve_commit, "org/other", None).given
    hub.stop()
    close_session()
    assert room.resolve_commit(NAME, None, said.append) == commit and "ConnectError" in said[2]
    assert "does not give it (ConnectError" in refused(room.resolve_commit, "org/other", None).given


@pytest.mark.parametrize(("code", "change"), [(errno.ENOSPC, "make room there"), (errno.EACCES, "set HF_HOME")])
def test_a_cache_that_takes_nothing_more_is_named(hub, monkeypatch, code, change):
    def full(*_args, **_more):
        raise OSError(code, os.strerror(code))

    hub.add(NAME, WHOLE)
    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    error = refused(fetch)
    assert f"config.json: {os.strerror(code)}" in error.given and change in error.change


def test_an_address_that_is_no_hub_is_named(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint + "/store")
    assert "does not answer as a hub does: " in refused(room.resolve_commit, NAME, None).given


def test_a_directory_comes_before_the_hub(hub, tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not room.is_hub_name(NAME) and room.is_hub_name("org/other")
    assert room.locate(NAME, None, "model.from").is_dir() and hub.answers == []
    assert (
        "neither a directory here nor in the cache of the hub"
        in refused(room.locate, "org/other", None, "model.from").given
    )


@pytest.mark.parametrize(
    "given", ["./model", "/models/org", "model", "org/model/sub", "~/model", "org/mo del", "-org/m"]
)
def test_a_path_is_no_hub_name(given):
    assert not room.is_hub_name(given)


TWO = """
from windlass.hub import client as hub
commit = hub.resolve_commit("org/model", None)
hub.fetch_config("org/model", commit)
hub.fetch_weights("org/model", commit)
"""


def test_two_processes_at_once_download_once(hub, tmp_path):
    hub.add(NAME, WHOLE)
    hub.slow_s = 0.6  # so that the second asks while the first is served
    env = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    both = [subprocess.Popen([sys.executable, "-c", TWO], env=env) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert hub.served("model.safetensors") == [200_000]
