"""What is part of the fingerprint besides settings and files: the date of a chat template that reads the clock, fixed once per
preparation; and the version of what finds languages."""

import numpy as np
import pytest

from tests.data.conftest import data_config
from tests.data.prepare.test_build import Killed, killed_at
from tests.data.tokenize.test_chat_template import PLAIN, chat_rows, template_of
from tests.data.tokenize.test_chat_template import planted as planted  # a fixture
from windlass.data.config import DataConfig, SourceConfig
from windlass.data.curate import language
from windlass.data.prepare.fingerprint import preparation_fingerprint, settings_of, stream_fingerprint
from windlass.data.prepare.manifest import load_prepared
from windlass.data.prepare.prepare import open_prepared, prepare
from windlass.data.shards.mds import Reader
from windlass.errors import UserError

DATED = "Today is {{ strftime_now('%d %b %Y') }}.\n" + PLAIN
FIRST, SECOND = "2026-11-21", "2026-11-22"


@pytest.fixture
def at(planted, tmp_path, monkeypatch):
    """Prepares below `name` on a day; other arguments as `data_config` takes them."""
    import json

    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows()))

    def run(day, name="data", template=DATED, log=lambda _: None, sets=(), begun=None, **changes):
        template_of(planted, template)
        monkeypatch.setattr("windlass.data.prepare.plan._today", lambda: day)
        source = {"path": str(tmp_path / "chat.jsonl"), "format": "chat"}
        tokenizer = {"from": str(planted.directory / "tokenizer")}
        settings = {
            "sources": [source],
            "tokenizer": tokenizer,
            "sequence_length": 256,
            "directory": str(tmp_path / name),
        }
        further = {extra: SourceConfig.model_validate(source) for extra in sets}
        return prepare(data_config(tmp_path, **settings | changes), further, log, begun)

    return run


def text_of(planted, prepared):
    return planted.tokenizer.decode(np.concatenate([ids for ids, _ in Reader(prepared.shards("train"))]).tolist())


def test_the_day_is_in_the_fingerprint_and_in_the_text(planted, at):
    first, second = at(FIRST), at(SECOND, "other")
    assert (first.date, second.date) == (FIRST, SECOND) and load_prepared(first.directory).date == FIRST
    assert first.fingerprint != second.fingerprint and first.stream != second.stream
    assert "Today is 21 Nov 2026." in text_of(planted, first) and "22 Nov" not in text_of(planted, first)
    assert "Today is 22 Nov 2026." in text_of(planted, second)


def test_a_later_start_keeps_the_day(at):
    first, lines = at(FIRST), []
    assert at(SECOND, log=lines.append) == first and "prepared already and unchanged" in lines[-1]
    more = at(SECOND, sets=("extra",), begun=first.stream)
    assert more.date == FIRST and more.stream == first.stream, "another evaluation set is no other day"
    assert at(SECOND, sequence_length=257).date == SECOND, "another preparation is of its own day"


@pytest.mark.parametrize("order", [{}, {"first_epoch": "written"}])
def test_a_preparation_that_is_killed_goes_on_with_its_first_day(planted, at, monkeypatch, order):
    changes = {"order": order, "shard_bytes": 4096}
    whole = at(FIRST, "whole", **changes)

    def dies(line):
        if line.startswith("validation: "):
            raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        if order:
            killed_at(patched, 1)
        at(FIRST, log=print if order else dies, **changes)
    found = at(SECOND, **changes)
    assert found.date == FIRST and found.fingerprint == whole.fingerprint and found.sets == whole.sets
    assert text_of(planted, found) == text_of(planted, whole)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ("{% set f = '%Y' %}{{ strftime_now(f) }}", "strftime_now(f) }}"),
        ("{% set now = strftime_now %}{{ now('%Y') }}", "strftime_now %}{{ now('%Y') }}"),
        ("{{ (strftime_now)('%Y') }}", "strftime_now)('%Y') }}"),
    ],
)
def test_a_use_of_the_clock_that_cannot_be_fixed_is_refused(at, call, named):
    with pytest.raises(UserError) as caught:
        at(FIRST, template=call + PLAIN)
    assert caught.value.given.startswith(f"the chat template reads the clock by {named}")
    assert "strftime_now('%d %b %Y')" in caught.value.rule


def test_a_template_without_the_clock_has_no_date(at):
    first = at(FIRST, template=PLAIN)
    assert first.date is None and at(SECOND, "other", template=PLAIN).fingerprint == first.fingerprint


def test_a_run_that_began_on_another_day_is_refused_where_its_data_is_gone(at):
    begun = at(FIRST).stream
    with pytest.raises(UserError, match="are not those that the run's checkpoint has read"):
        at(SECOND, "elsewhere", begun=begun)


def test_a_limit_on_rows_is_no_setting_of_the_shards_and_a_format_of_files_is_one(tmp_path):
    def of(**source):
        return settings_of(data_config(tmp_path, sources=[{"path": "a", **source}]), {"more": SourceConfig(path="b")})

    assert of() == of(max_row_mib=1)
    assert "max_row_mib" not in {*of()["sources"][0], *of()["sets"]["more"]}
    assert of(file_format="jsonl")["sources"][0]["file_format"] == "jsonl"


def test_the_fingerprint_of_a_recipe_is_pinned():
    """Where it changes, every preparation of the version before is made again: never by accident."""
    two = [{"path": "a", "weight": 1}, {"path": "b.jsonl", "format": "chat", "weight": 2}]
    given = {"sources": two, "tokenizer": {"from": "t"}, "directory": "d", "sequence_length": 33}
    config = DataConfig.model_validate({**given, "validation": {"path": "v"}})
    settings = settings_of(config, {"more": SourceConfig(path="m")})
    assert preparation_fingerprint(settings, {}, []) == "d3650ba361745a58494c247f5d0f763a"
    assert stream_fingerprint(settings, {}, []) == "fda36bd3d81a71417bbd22354a011f88"


def english(root, **changes):
    """A preparation of texts of which some are filtered by language."""
    (root / "english").mkdir(exist_ok=True)
    for number in range(12):
        text = f"The ship hauls its anchor up before the tide turns, and all {number} hands are on deck."
        (root / "english" / f"{number}.txt").write_text(text)
    source = {"path": str(root / "english"), "filters": {"language": "en"}} | changes
    return data_config(root, sources=[source], validation="none")


def test_another_version_of_what_finds_languages_prepares_anew(tmp_path, monkeypatch):
    def made(config, lines):
        return prepare(config, {}, lines.append)

    first, lines = made(english(tmp_path), []), []
    assert made(english(tmp_path), lines) == first and "prepared already and unchanged" in lines[-1]
    monkeypatch.setattr(language, "version", lambda _name: "99.0")
    assert open_prepared(english(tmp_path), {}) == first, "who reads what is prepared needs no library of languages"
    second = made(english(tmp_path), lines := [])
    assert f"preparing {tmp_path}/data: the sources or settings have changed since it was prepared" in lines
    assert second.fingerprint != first.fingerprint and second.stream != first.stream
    monkeypatch.setattr(language, "version", lambda _name: "99.1")
    assert made(english(tmp_path), []).fingerprint not in (first.fingerprint, second.fingerprint)
    with pytest.raises(
        UserError, match=r"and with filters\.language or deduplicate\.similarity the old py3langid or rensa"
    ):
        prepare(english(tmp_path), {}, print, begun=first.stream)


def test_data_without_a_filter_by_language_is_recognised_whatever_finds_languages(tmp_path, monkeypatch):
    config, lines = english(tmp_path, filters={"min_chars": 9}), []
    first = prepare(config, {}, print)
    monkeypatch.setattr(language, "version", lambda _name: pytest.fail("asked"))
    assert prepare(config, {}, lines.append) == first and "prepared already and unchanged" in lines[-1]
