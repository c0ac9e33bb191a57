"""A directory that is still being filled: one order of documents, whoever looks when."""

import threading
import time

import pytest

from tests.data.conftest import data_config, make_text
from tests.data.prepare.test_build import Killed, killed_at, without_journal
from tests.data.prepare.test_prepare import content, documents_of, quietly
from windlass.data.config import SourceConfig
from windlass.data.prepare.manifest import load_prepared
from windlass.data.prepare.prepare import prepare
from windlass.data.sources.growing import Patience, growing_rows, scan_growing, what_changed
from windlass.data.tokenize.tokenizer import open_tokenizer
from windlass.errors import UserError

DONE = "_SUCCESS"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("windlass.data.sources.growing.POLL_S", 0.01)


def source(directory, **more):
    return SourceConfig(path=str(directory), grows_until=DONE, **more)


def put(directory, name, text):
    """As who fills the directory does: a file has its name when it is whole."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}")
    draft.write_text(text)
    draft.rename(path)


def test_files_come_in_the_order_of_their_names_until_the_last_is_there(tmp_path):
    put(tmp_path, "a.txt", "first")

    def fill():
        for name, text in (("b.jsonl", '{"text": "second"}\n{"text": "third"}\n'), ("c/d.txt", "fourth"), (DONE, "")):
            time.sleep(0.05)
            put(tmp_path, name, text)

    thread = threading.Thread(target=fill)
    thread.start()
    assert list(growing_rows(source(tmp_path), Patience(20.0))) == ["first", "second", "third", "fourth"]
    thread.join()
    put(tmp_path, ".hidden", "no document")
    assert len(list(growing_rows(source(tmp_path), Patience()))) == 4


def test_the_last_files_are_not_missed_where_the_mark_comes_with_them(tmp_path, monkeypatch):
    """The mark is looked for before the files: here both come between the two looks."""
    import windlass.data.sources.growing as room

    put(tmp_path, "a.txt", "first")
    names_below, looks = room.names_below, []

    def names(directory):
        found = names_below(directory)
        if not looks:
            put(tmp_path, "b.txt", "second")
            put(tmp_path, DONE, "")
        looks.append(found)
        return found

    monkeypatch.setattr(room, "names_below", names)
    assert list(growing_rows(source(tmp_path), Patience(20.0))) == ["first", "second"]


def test_a_file_that_comes_too_late_for_its_name_is_named(tmp_path):
    for name in ("a.txt", "c.txt"):
        put(tmp_path, name, name)
    rows = growing_rows(source(tmp_path), Patience(20.0))
    assert [next(rows), next(rows)] == ["a.txt", "c.txt"]
    put(tmp_path, "b.txt", "late")
    with pytest.raises(
        UserError, match=r"was taken up to c.txt, and now holds other files up to that name: a.txt, b.txt, c.txt"
    ):
        next(rows)


def test_a_directory_that_no_longer_grows_is_named_within_the_deadline(tmp_path):
    put(tmp_path, "a.txt", "first")
    ticks = []
    rows = growing_rows(source(tmp_path), Patience(0.2, lambda: ticks.append(0)))
    next(rows)
    with pytest.raises(UserError) as caught:
        next(rows)
    assert f"{tmp_path} holds 1 file, no further one came within" in caught.value.given and DONE in caught.value.given
    assert "data.order.deadline_s=0.2" in caught.value.rule and f"make {DONE}" in caught.value.change
    assert ticks


def test_it_is_known_by_its_place(tmp_path):
    assert scan_growing(source(tmp_path)) == scan_growing(source(tmp_path))
    with pytest.raises(UserError, match="is no directory"):
        scan_growing(source(tmp_path / "none"))


def test_a_binary_file_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\0\1")
    with pytest.raises(UserError, match="binary"):
        next(growing_rows(source(tmp_path), Patience()))


@pytest.fixture
def filled(tmp_path):
    """A whole directory, a tokenizer, and the settings of a preparation of it as it grows."""
    quietly(data_config(tmp_path, directory=str(tmp_path / "first"), sources=[{"path": _fill(tmp_path / "src")}]))
    put(tmp_path / "src", DONE, "")
    return {
        "sources": [{"path": str(tmp_path / "src"), "grows_until": DONE}],
        "tokenizer": {"from": str(tmp_path / "first" / "tokenizer")},
        "order": {"first_epoch": "written", "held_out_of": 20},
        "directory": str(tmp_path / "grown"),
    }


def _fill(directory):
    for number in range(60):
        put(directory, f"{number:03}.txt", make_text(60, number))
    return str(directory)


def test_a_source_that_grows_gives_what_a_source_that_is_whole_gives(filled, tmp_path):
    grown = quietly(data_config(tmp_path, **filled))
    plain = {**filled, "sources": [{"path": str(tmp_path / "src" / "*.txt")}], "directory": str(tmp_path / "plain")}
    whole = quietly(data_config(tmp_path, **plain))
    for name in ("train", "validation", "tokenizer"):
        assert content(grown.directory / name) == content(whole.directory / name)


@pytest.mark.long
def test_a_share_of_the_first_documents_is_held_out_and_its_copies_are_nowhere_else(filled, tmp_path):
    texts = [path.read_bytes().decode() for path in sorted((tmp_path / "src").glob("*.txt"))]
    first = quietly(data_config(tmp_path, **filled))
    held_out = documents_of(first, "validation")
    assert 0 < len(held_out) < 20 and set(held_out) <= set(texts[:20])
    assert documents_of(first, "train") == [text for text in texts if text not in held_out]
    (tmp_path / "src" / DONE).unlink()
    put(tmp_path / "src", "100.txt", held_out[0])
    put(tmp_path / "src", "101.txt", "and one more")
    put(tmp_path / "src", DONE, "")
    again = quietly(data_config(tmp_path, **{**filled, "directory": str(tmp_path / "again")}))
    assert documents_of(again, "train") == [*documents_of(first, "train"), "and one more"]


def test_killed_and_begun_again_it_is_the_same(filled, tmp_path, monkeypatch):
    whole = without_journal(quietly(data_config(tmp_path, **filled)).directory)
    monkeypatch.setattr(
        "windlass.data.sources.fetch.CHUNK_BYTES", 2000
    )  # else all rows are in memory when it is killed
    with monkeypatch.context() as patched, pytest.raises(Killed):
        killed_at(patched, 2)
        quietly(data_config(tmp_path, **{**filled, "directory": str(tmp_path / "second")}))
    assert list((tmp_path / ".second.work" / "fetched" / "sources.0").iterdir())
    second = quietly(data_config(tmp_path, **{**filled, "directory": str(tmp_path / "second")}))
    assert without_journal(second.directory) == whole


@pytest.mark.long
def test_files_that_are_others_when_it_is_begun_again_are_refused(filled, tmp_path, monkeypatch):
    monkeypatch.setattr("windlass.data.sources.fetch.CHUNK_BYTES", 2000)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        killed_at(patched, 2)
        quietly(data_config(tmp_path, **filled))
    put(tmp_path / "src", "000a.txt", "between")
    with pytest.raises(UserError, match="row 1 is not the one that was taken before"):
        quietly(data_config(tmp_path, **filled))
    assert open_tokenizer(tmp_path / "grown" / "tokenizer")


def test_a_finished_source_with_another_file_is_prepared_again_and_else_left(filled, tmp_path):
    config, lines = data_config(tmp_path, **filled), []
    first = quietly(config)
    assert (
        len(first.written_order["sources.0"]) == 61
        and load_prepared(first.directory).written_order == first.written_order
    )
    prepare(config, {}, lines.append)
    assert len(lines) == 1 and "unchanged" in lines[0]
    put(tmp_path / "src", "!.txt", make_text(60, 99))
    with pytest.raises(UserError, match="are not those that the run's checkpoint has read"):
        prepare(config, {}, lines.append, begun=first.stream)
    assert load_prepared(first.directory).written_order == first.written_order
    lines.clear()
    seen = []
    again = prepare(config, {}, lines.append, on_fingerprint=lambda _: seen.append(load_prepared(first.directory)))
    assert lines[0] == f"preparing {first.directory}: {tmp_path}/src/!.txt has come since it was prepared"
    assert seen[0] is None, "who waits for the fingerprint took the old preparation for it"
    assert "!.txt" in again.written_order["sources.0"]
    fresh = quietly(data_config(tmp_path, **{**filled, "directory": str(tmp_path / "fresh")}))
    assert without_journal(again.directory) == without_journal(fresh.directory)


def test_what_changed_names_the_file(tmp_path):
    for name in ("b.txt", "c.txt", DONE):
        put(tmp_path, name, name)
    taken = {}
    list(growing_rows(source(tmp_path), Patience(take=taken.__setitem__)))
    first = {"b.txt": taken["b.txt"]}  # of a limited source, whose end was not read
    assert what_changed(source(tmp_path), taken) is None and what_changed(source(tmp_path), first) is None
    put(tmp_path, "d.txt", "later")
    assert what_changed(source(tmp_path), taken) == f"{tmp_path}/d.txt has come since it was prepared"
    assert what_changed(source(tmp_path), first) is None
    put(tmp_path, "c.txt", "C.txt")
    assert what_changed(source(tmp_path), taken) == f"{tmp_path}/c.txt has changed since it was prepared"
    put(tmp_path, "a.txt", "earlier")
    assert what_changed(source(tmp_path), first) == f"{tmp_path}/a.txt has come since it was prepared"
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).unlink()
    assert what_changed(source(tmp_path), first) == f"{tmp_path}/b.txt is gone since it was prepared"


@pytest.mark.parametrize(
    ("name", "more", "says", "change"),
    [
        ("README.md", {"format": "chat"}, "`format: chat` with {}/README.md", "take it out"),
        ("notes.txt", {"format": "preference"}, "`format: preference` with {}/notes.txt", "take it out"),
        ("b.csv", {}, "{}/b.csv has no column `text`", "set `text` of the source to one of its columns"),
        ("b.txt", {"text": "body"}, "`text: body` with {}", "leave `text` out"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_name_when_it_comes(tmp_path, name, more, says, change):
    config = source(tmp_path, **more)
    scan_growing(config)
    rows = growing_rows(config, Patience(20.0))
    put(tmp_path, name, '{"messages": 1}')
    put(tmp_path, DONE, "")
    with pytest.raises(UserError) as caught:
        list(rows)
    assert caught.value.given.startswith(says.format(tmp_path)) and change in caught.value.change
    if name != "b.csv":  # and before anything is read, where it is there already
        with pytest.raises(UserError) as early:
            scan_growing(config)
        assert early.value.given == caught.value.given


def test_the_key_of_lines_is_for_a_source_that_has_such_lines_somewhere(tmp_path):
    put(tmp_path, "a.txt", "plain")
    config = source(tmp_path, text="body")
    scan_growing(config)
    put(tmp_path, "b.jsonl", '{"body": "of a line"}\n')
    put(tmp_path, DONE, "")
    scan_growing(config)
    assert list(growing_rows(config, Patience())) == ["plain", "of a line"]
