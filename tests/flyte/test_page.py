"""The live report: flushed where there is news and only there, bounded, and safe whatever a run's words are."""

import threading

import pytest

from windlass.errors import UserError
from windlass.flyte.page import MOST_BYTES, LivePage, flushed_page
from windlass.report.events import EventLog


@pytest.fixture
def log(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.write("start", 0, {})
    return log


def test_a_look_flushes_only_where_there_is_news(log, tmp_path):
    pages = []
    live = LivePage(tmp_path, pages.append)
    for _ in range(3):
        live.look()
    assert len(pages) == 1
    log.write("step", 1, {"loss": 3.5})
    for _ in range(3):
        live.look()
    assert len(pages) == 2 and "3.5000" in pages[1] and "3.5000" not in pages[0]


def test_a_run_without_events_has_no_page_yet(tmp_path):
    LivePage(tmp_path / "none", lambda page: pytest.fail(page)).look()


def test_what_came_last_is_flushed_at_the_end_even_of_a_failure(log, tmp_path):
    pages = []
    with pytest.raises(UserError), flushed_page(tmp_path, pages.append, every_s=1e6):
        log.write("step", 7, {"loss": 2.25})
        raise UserError("given", "rule", "change")
    assert len(pages) == 1 and "2.2500" in pages[0]
    assert "flyte-report" not in [thread.name for thread in threading.enumerate()]


def test_the_page_is_bounded_and_holds_no_markup_of_the_runs(log, tmp_path):
    for step in range(2000):
        log.write("incident", step, {"what": "x" * 1000})
    for step in range(40):
        log.write("sample", step, {"prompt": f"p{step}", "text": "é" * 4000})
    log.write("end", 2000, {"reason": "</script><script>"})
    pages = []
    LivePage(tmp_path, pages.append).look()
    assert pages[0].count("<script") == 2 and "&lt;script&gt;" in pages[0] and len(pages[0].encode()) <= MOST_BYTES


def test_an_upload_that_fails_is_said_once_and_tried_again(log, tmp_path, capsys):
    """The thread went on with nothing after the first failure."""
    pages, down = [], [ConnectionError("no network")] * 3

    def flush(page):
        if down:
            raise down.pop()
        pages.append(page)

    live = LivePage(tmp_path, flush)
    for _ in range(5):
        live.look()
    assert len(pages) == 1, "the fourth look flushed, and the fifth had no news"
    assert capsys.readouterr().err.count("not flushed, and tried again: ConnectionError: no network") == 1
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write("damaged\n")
    live.look()
    assert "line 2" in capsys.readouterr().err and len(pages) == 1
