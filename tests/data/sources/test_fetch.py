"""What is at a URL is brought here once, goes on after a kill, and is never another file than the one that was seen."""

import gzip
import json
import os
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import pytest
from tokenizers import models, pre_tokenizers

from tests.data.conftest import data_config
from windlass.data.config import SourceConfig
from windlass.data.prepare.prepare import prepare
from windlass.data.sources import fetch as room
from windlass.data.sources.bad_rows import Placed
from windlass.data.sources.fetch import fetch
from windlass.data.sources.scan import scan
from windlass.data.sources.source_files import Source, is_remote
from windlass.data.tokenize.tokenizer import save_trained, train_tokenizer
from windlass.errors import AbsentSource, UserError

TEXTS = [f"document {number} " + "x" * (number % 7) for number in range(40)]


@pytest.fixture
def place(tmp_path):
    (tmp_path / "there").mkdir()
    for number in range(4):
        lines = [json.dumps({"text": text}) for text in TEXTS[10 * number : 10 * number + 10]]
        (tmp_path / "there" / f"{number}.jsonl").write_text("\n".join(lines))
    return tmp_path / "there"


def read(config, directory, lines=None):
    files = scan(config, print)
    assert all(map(is_remote, files))
    return list(Source(fetch(config, files, directory, (lines if lines is not None else []).append)).documents())


@pytest.mark.parametrize("end", ["", "/*.jsonl"])
def test_a_folder_and_a_glob_of_a_url_are_its_files_in_order(place, tmp_path, end):
    lines = []
    assert read(SourceConfig(path=f"file://{place}{end}"), tmp_path / "here", lines) == TEXTS
    assert "fetched 40 rows" in lines[-1] and "/s, " in lines[-1]


def test_hidden_files_and_folders_of_a_url_are_left_out_as_those_of_a_directory(tmp_path):
    place = tmp_path / ".cache" / "there"  # hidden itself: it was asked for
    for name in ("a.jsonl", "sub/b.jsonl", ".c.jsonl", ".ipynb_checkpoints/a.jsonl", "sub/.trash/deep/d.jsonl"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(json.dumps({"text": name}))
    for end in (
        "",
        "/**/*.jsonl",
        "/*/*.jsonl",
        "/[a-z]*/*.jsonl",
        "/[s]ub/*.jsonl",
        "/.*/*.jsonl",
        "/.ipynb_checkpoints/[a]*",
    ):
        here, there = (
            scan(SourceConfig(path=f"{place}{end}"), print),
            scan(SourceConfig(path=f"file://{place}{end}"), print),
        )
        assert [f"file://{file.path}" for file in here] == [file.path for file in there], end


def test_a_url_in_memory_a_file_among_local_ones_rows_and_limits(tmp_path):
    system = fsspec.filesystem("memory")
    system.pipe("/room/a.jsonl", "\n".join(json.dumps({"text": text}) for text in TEXTS).encode())
    url = "memory://room/a.jsonl"
    assert read(SourceConfig(path=url, rows="3:20", documents=5), tmp_path / "1") == TEXTS[3:8]
    (tmp_path / "b.txt").write_text("local")
    config = SourceConfig(path=[str(tmp_path / "b.txt"), url])
    assert list(Source(fetch(config, scan(config, print), tmp_path / "2", print)).documents()) == ["local", *TEXTS]
    limited = SourceConfig(path=url, tokens=20)
    assert 0 < len(read(limited, tmp_path / "3")) < 10, "no more is fetched than a limit in tokens may need"
    system.rm("/room", recursive=True)


@pytest.mark.parametrize("num_kept", [1, 3])
def test_a_killed_fetch_goes_on_behind_its_last_whole_chunk(place, tmp_path, monkeypatch, num_kept):
    monkeypatch.setattr(room, "CHUNK_BYTES", 200)
    config = SourceConfig(path=f"file://{place}", rows="2:", documents=33)
    files = scan(config, print)
    whole = fetch(config, files, tmp_path / "whole", print)
    assert len(whole) > 4
    for path in sorted((tmp_path / "whole").iterdir())[:num_kept]:
        (tmp_path / "begun").mkdir(exist_ok=True)
        (tmp_path / "begun" / path.name).write_bytes(path.read_bytes())
    lines = []
    again = fetch(config, files, tmp_path / "begun", lines.append)
    assert " rows were fetched before; continuing after them" in lines[0]
    assert [file[1:] for file in again] == [file[1:] for file in whole]
    assert list(Source(again).documents()) == TEXTS[2:35]


def test_what_is_fetched_whole_is_not_asked_for_again(place, tmp_path, monkeypatch):
    config, lines = SourceConfig(path=f"file://{place}"), []
    files = scan(config, print)
    fetched = fetch(config, files, tmp_path / "here", print)
    with monkeypatch.context() as patched:
        patched.setattr(room, "url_rows", lambda *_: pytest.fail("asked for again"))
        assert [file[1:] for file in fetch(config, files, tmp_path / "here", lines.append)] == [f[1:] for f in fetched]
    assert lines == [f"{config.label}: all 40 rows were fetched before"]
    fetched[-1].path.unlink()
    assert list(Source(fetch(config, files, tmp_path / "here", print)).documents()) == TEXTS, "but for what is lost"


def test_the_places_of_rows_are_kept_and_are_no_text(place, tmp_path):
    stream = room.Stream(SourceConfig(path=f"file://{place}"), [], tmp_path / "here", print)
    for row in (Placed.at("x", "a.csv:12"), "x"):
        stream._chunks.add(row)
    assert stream._chunks.bytes == 2 * len(b'{"text": "x"}\n'), "or a limit in tokens would end a fetch too early"
    for _ in range(2):
        assert [getattr(row, "place", None) for row in stream._chunks.kept()] == ["a.csv:12", None]
        stream._chunks.flush()


def test_a_file_that_changes_behind_its_url_is_an_error(place, tmp_path):
    config = SourceConfig(path=f"file://{place}")
    files = scan(config, print)
    (place / "2.jsonl").write_text('{"text": "another"}')
    os.utime(place / "2.jsonl", (time.time() + 5, time.time() + 5))
    with pytest.raises(UserError, match=r"2\.jsonl changed while it was being prepared"):
        fetch(config, files, tmp_path / "here", print)


def refused(path):
    with pytest.raises(UserError) as caught:
        scan(SourceConfig(path=path), print)
    return caught.value


def test_what_cannot_be_reached_is_named_without_its_secrets(tmp_path):
    assert refused(f"file://{tmp_path}/none").given == f"`path: file://{tmp_path}/none` matches no file"
    assert refused(f"file://{tmp_path}/*.x").given == f"`path: file://{tmp_path}/*.x` matches no file"
    assert "nosuch" in refused("nosuch://x/y").given and "check the URL" in refused("nosuch://x/y").change
    assert not isinstance(refused("nosuch://x/y"), AbsentSource)
    error = refused("http://127.0.0.1:9/x.jsonl?signature=51gn")
    assert "http://127.0.0.1:9/x.jsonl?***" in error.given and "51gn" not in str(error)


def test_a_limit_in_tokens_that_what_was_fetched_cannot_reach_is_said(tmp_path):
    system = fsspec.filesystem("memory")
    words = [f"{number} " + "word " * 400 for number in range(60)]
    system.pipe("/wordy/a.jsonl", "\n".join(json.dumps({"text": text}) for text in words).encode())
    source = {"path": "memory://wordy/a.jsonl", "tokens": 2000}
    config = data_config(tmp_path, sources=[source], tokenizer={"train": 257}, validation=0.3)
    assert 2000 <= prepare(config, {}, log=lambda line: None).sets["train"].tokens < 4100
    source, given = {**source, "tokens": 9000}, {"from": str(big_tokens(tmp_path))}
    with pytest.raises(UserError) as caught:
        prepare(data_config(tmp_path, sources=[source], tokenizer=given, validation=0.3), {}, log=lambda line: None)
    assert caught.value.given.startswith("`tokens: 9000` of a source; ")
    assert "give the limit as `documents`" in caught.value.change
    system.rm("/wordy", recursive=True)


def big_tokens(tmp_path):
    """A tokenizer to which " word word" is one token."""
    tokenizer = train_tokenizer([], 257)
    vocabulary = tokenizer.get_vocab()
    merges = [("w", "o"), ("wo", "r"), ("wor", "d"), ("Ġ", "word"), ("Ġword", "Ġword"), ("ĠwordĠword", "ĠwordĠword")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer.model = models.BPE(vocabulary, merges)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    save_trained(tokenizer, tmp_path / "big")
    return tmp_path / "big"


class Web(SimpleHTTPRequestHandler):
    """A web server that gives a time of change, unless its folder says otherwise."""

    def send_header(self, key, value):
        if key != "Last-Modified" or not os.path.exists(os.path.join(self.directory, ".unmarked")):
            super().send_header(key, value)

    def log_message(self, *_):
        pass


@pytest.fixture
def web(place):
    """The URL of a web server of `place`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: Web(*given, directory=str(place)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_signed_url_is_read_as_what_its_name_says(place, web, tmp_path):
    """The query is no part of the name: read as a text, all lines would be one document."""
    (place / "1.jsonl.gz").write_bytes(gzip.compress((place / "1.jsonl").read_bytes()))
    signed = [f"{web}/0.jsonl?signature=51gn&x=a.txt", f"{web}/1.jsonl.gz?signature=51gn"]
    assert read(SourceConfig(path=signed), tmp_path / "here") == TEXTS[:20]


def test_a_fresh_signature_is_no_other_file(place, web):
    old, new = (scan(SourceConfig(path=f"{web}/0.jsonl?sig={sig}"), print) for sig in ("51/gn=", "0th/er"))
    assert [file[1:] for file in old] == [file[1:] for file in new] and old[0].name == "0.jsonl"


def test_a_row_of_a_signed_url_is_named_by_its_line(place, web, tmp_path):
    (place / "0.jsonl").write_text('{"text": "a"}\nno JSON')
    with pytest.raises(UserError) as caught:
        read(SourceConfig(path=f"{web}/0.jsonl?sig=51gn"), tmp_path / "here")
    assert caught.value.given.startswith(f"{web}/0.jsonl?***:2 is not JSON")


def put_other(path):
    """Another text of the same size, an hour later."""
    path.write_text(path.read_text().replace("document", "argument"))
    os.utime(path, (path.stat().st_mtime + 3600,) * 2)


def test_a_file_of_a_web_server_that_changes_at_the_same_size_is_prepared_again(place, web, tmp_path):
    config, lines = data_config(tmp_path, sources=[{"path": f"{web}/{k}.jsonl"} for k in range(4)]), []
    first = prepare(config, {}, lines.append)
    assert not any("known by its size" in line for line in lines)
    prepare(config, {}, lines.append)
    assert "skipped" in lines[-1]
    put_other(place / "2.jsonl")
    assert prepare(config, {}, lines.append).fingerprint != first.fingerprint
    assert any("sources or settings have changed" in line for line in lines)


def test_a_file_without_a_mark_is_known_by_its_size_and_that_is_said(place, web):
    (place / ".unmarked").touch()
    config, lines = SourceConfig(path=[f"{web}/0.jsonl", f"{web}/1.jsonl"]), []
    before = scan(config, lines.append)
    put_other(place / "0.jsonl")
    assert scan(config, lines.append) == before
    assert len(lines) == 4 and lines[0].startswith(f"{web}/0.jsonl has no ETag and no time of change")


def test_a_glob_of_a_web_server_is_its_files_in_order(place, web, tmp_path):
    config = SourceConfig(path=f"{web}/*.jsonl")
    assert read(config, tmp_path / "here") == TEXTS
    before = scan(config, print)
    put_other(place / "3.jsonl")
    assert [a == b for a, b in zip(before, scan(config, print))] == [True, True, True, False]
