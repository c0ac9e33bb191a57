"""Two ways of making, one result: a training set that grows in place is the one that takes its place whole."""

import itertools

import pytest

from tests.data.conftest import data_config, write_corpus
from tests.data.prepare.test_prepare import content, quietly
from windlass.data.config import SourceConfig
from windlass.data.lint.lint import lint
from windlass.data.prepare import build as room
from windlass.data.prepare.manifest import open_prepared
from windlass.data.prepare.prepare import prepare
from windlass.data.prepare.write_set import PACK
from windlass.data.shards.journal import JOURNAL_FILES, JournaledWriter, open_journal, read_beat
from windlass.errors import BadShard, UserError

WRITTEN = {"first_epoch": "written"}


def growing_config(root, **changes):
    return data_config(root, directory=str(root / "grown"), **{"order": WRITTEN, **changes})


def without_journal(directory):
    return {name: data for name, data in content(directory).items() if name.as_posix() not in JOURNAL_FILES}


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_a_set_that_grows_is_to_the_byte_the_one_that_is_made_whole(corpus, tmp_path, packing):
    plain = quietly(data_config(tmp_path, packing=packing))
    grown = quietly(growing_config(tmp_path, packing=packing))
    assert without_journal(grown.directory) == content(plain.directory)
    assert (grown.stream, grown.fingerprint) == (plain.stream, plain.fingerprint)
    logged = open_journal(grown.directory)
    assert logged.end is not None and len(logged.shards) == len(logged.entries) > 3
    assert max(logged.most_documents) == grown.sets["train"].max_documents


class Killed(BaseException):
    """As a kill: nothing that catches errors sees it."""


def killed_at(monkeypatch, number):
    """The `number`th shard of a training set that grows is not written."""
    numbers, put = itertools.count(), JournaledWriter.put

    def dies(self, *arguments):
        if next(numbers) == number:
            raise Killed
        put(self, *arguments)

    monkeypatch.setattr(JournaledWriter, "put", dies)


@pytest.mark.parametrize("number", [2, *(pytest.param(at, marks=pytest.mark.long) for at in (0, 5))])
def test_a_preparation_that_is_killed_goes_on_and_readers_see_nothing_of_it(corpus, tmp_path, monkeypatch, number):
    whole = content(quietly(data_config(tmp_path)).directory)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        killed_at(patched, number)
        quietly(growing_config(tmp_path))
    directory = tmp_path / "grown"
    follower = open_journal(directory)
    assert len(follower.shards) == number and not (directory / "prepared.json").exists()
    before = {path: path.stat().st_mtime_ns for path in (directory / "train").iterdir()}
    lines = []
    quietly(growing_config(tmp_path), lines=lines)
    assert f"{number} shards of the training set exist: continuing after them" in lines
    assert without_journal(directory) == whole
    assert before == {path: path.stat().st_mtime_ns for path in before}
    follower.read()
    assert follower.end is not None


def test_open_data_says_how_far_it_is(corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(Killed):
        killed_at(patched, 3)
        quietly(growing_config(tmp_path))
    found = open_prepared(growing_config(tmp_path), {})
    plain = quietly(data_config(tmp_path))
    assert not found.is_whole and plain.is_whole
    codes = {finding.code for finding in lint(found).findings}
    assert codes <= {finding.code for finding in lint(plain).findings}, "that the last document goes on is no fault"
    assert found.sets["validation"] == plain.sets["validation"]
    shards = found.shards("train").shards
    assert found.sets["train"].samples == sum(shard.num_samples for shard in shards) and len(shards) == 3
    same = ("stream", "fingerprint", "corpus_hash", "vocab_size", "eos_id")
    assert [getattr(found, name) for name in same] == [getattr(plain, name) for name in same]
    with pytest.raises(UserError, match="holds no prepared data"):
        open_prepared(growing_config(tmp_path, order={}), {})
    with pytest.raises(UserError, match="was prepared with sequence_length 33, the recipe has 34"):
        open_prepared(growing_config(tmp_path, sequence_length=34), {})


@pytest.mark.long
def test_another_preparation_takes_the_place_of_what_was_begun(corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(Killed):
        killed_at(patched, 3)
        quietly(growing_config(tmp_path))
    grown = quietly(growing_config(tmp_path, sequence_length=40))
    plain = quietly(data_config(tmp_path, sequence_length=40))
    assert without_journal(grown.directory) == content(plain.directory)


def test_what_is_damaged_of_the_first_files_is_made_again(corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(Killed):
        killed_at(patched, 3)
        quietly(growing_config(tmp_path))
    (tmp_path / "grown" / "validation" / "shard.00000.mds").unlink()
    lines = []
    grown = quietly(growing_config(tmp_path), lines=lines)
    assert any(line.startswith("preparing again from the start: ") for line in lines)
    assert without_journal(grown.directory) == content(quietly(data_config(tmp_path)).directory)


def test_a_failure_is_reported_to_who_waits_and_the_work_is_kept(corpus, tmp_path, monkeypatch):
    put = JournaledWriter.put

    def fails(self, *arguments):
        if len(self._entries) == 2:
            raise UserError("row 7 is no text", "rows are texts", "fix row 7")
        put(self, *arguments)

    with monkeypatch.context() as patched, pytest.raises(UserError):
        patched.setattr(JournaledWriter, "put", fails)
        quietly(growing_config(tmp_path))
    assert read_beat(tmp_path / "grown")[1].given == "row 7 is no text"
    assert list((tmp_path / ".grown.work").iterdir())
    quietly(growing_config(tmp_path))
    assert read_beat(tmp_path / "grown")[1] is None and not (tmp_path / ".grown.work").exists()


def test_before_anything_can_be_read_a_failure_leaves_nothing(corpus, tmp_path, monkeypatch):
    def fails(*_):
        raise UserError("given", "rule", "change")

    monkeypatch.setattr(room.journal, "begin_journal", fails)
    with pytest.raises(UserError):
        quietly(growing_config(tmp_path))
    assert not (tmp_path / "grown").exists() and not (tmp_path / ".grown.work").exists()


def test_shards_that_come_out_otherwise_are_refused(corpus, tmp_path, monkeypatch):
    """A library that cuts words otherwise than the one that began."""
    with monkeypatch.context() as patched, pytest.raises(Killed):
        killed_at(patched, 3)
        quietly(growing_config(tmp_path))
    monkeypatch.setitem(
        PACK,
        "concatenate",
        lambda *_: iter([(data := __import__("numpy").ones((500, 34), "i4"), data)]),
    )
    with pytest.raises(BadShard, match="comes out with"):
        quietly(growing_config(tmp_path))


def test_a_directory_of_something_else_is_not_touched(corpus, tmp_path):
    (tmp_path / "grown").mkdir()
    (tmp_path / "grown" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"holds what windlass did not prepare: thesis.tex"):
        quietly(growing_config(tmp_path))
    assert (tmp_path / "grown" / "thesis.tex").read_text() == "x"


@pytest.mark.long
def test_further_sets_are_whole_before_the_training_set_begins(corpus, tmp_path, monkeypatch):
    write_corpus(tmp_path / "other", 12, seed=3)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        killed_at(patched, 0)
        prepare(growing_config(tmp_path), {"other": SourceConfig(path=str(tmp_path / "other"))}, log=lambda _: None)
    assert set(open_journal(tmp_path / "grown").begin["sets"]) == {"validation", "other"}
    for name in ("validation", "other"):
        assert (tmp_path / "grown" / name / "index.json").is_file()


@pytest.mark.parametrize(
    ("changes", "keeps"),
    [
        ({}, False),
        ({"packing": "best-fit"}, False),
        ({"sources": [{"path": "corpus", "documents": 20}]}, True),
        ({"shard_bytes": 256 << 20}, True),
    ],
)
def test_room_for_ids_is_asked_where_they_stay_on_disk(corpus, tmp_path, monkeypatch, changes, keeps):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(room, "check_room", lambda *_, keeps_ids: asked.append(keeps_ids))
    prepare(data_config(tmp_path, **changes), {}, log=lambda _: None)
    assert asked == [keeps]
