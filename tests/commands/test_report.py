"""`windlass report` writes the page of a run or of several, and refuses a directory that is none."""

import pytest

from windlass.commands.report import report, serve_reports
from windlass.errors import UserError
from windlass.report.events import EventLog


def test_the_page_is_written_anew_from_the_events(run):
    page = run / "report.html"
    page.write_text("old")
    assert report([run], None) == page and page.read_text().startswith("<!doctype html>")


def test_several_runs_are_one_page_at_the_place_that_is_named(run, tmp_path):
    EventLog(tmp_path / "other" / "events.jsonl").write("start", 0, {})
    before = (run / "report.html").read_text() if (run / "report.html").is_file() else None
    page = report([run, tmp_path / "other"], tmp_path / "both.html")
    assert page == tmp_path / "both.html" and "2 runs - windlass" in page.read_text()
    assert before is None or (run / "report.html").read_text() == before, "the page of one run stays"
    assert report([run], tmp_path / "one.html").read_text().count("<title>") == 1


@pytest.mark.parametrize(
    ("runs", "output", "words"),
    [
        (["a"], None, "events.jsonl does not exist"),
        (["a", "b"], None, "2 runs without --output"),
        (["a"], "absent/page.html", "there is no directory"),
    ],
)
def test_what_makes_no_page_is_refused(tmp_path, runs, output, words):
    with pytest.raises(UserError) as caught:
        report([tmp_path / name for name in runs], output and tmp_path / output)
    assert words in str(caught.value) and not any(tmp_path.iterdir())


def test_a_page_is_written_or_served(tmp_path):
    with pytest.raises(UserError, match="--output with --serve"):
        serve_reports([tmp_path], tmp_path / "page.html", 0, print)
    with pytest.raises(UserError, match=r"events\.jsonl does not exist"):
        serve_reports([tmp_path], None, 0, print)
