"""`windlass report` writes the page of a run, and refuses a directory that is none."""

import pytest

from windlass.commands.report import report
from windlass.errors import UserError


def test_the_page_is_written_anew_from_the_events(run):
    page = run / "report.html"
    page.write_text("old")
    assert report(run) == page and page.read_text().startswith("<!doctype html>")


def test_a_directory_without_events_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"events\.jsonl does not exist"):
        report(tmp_path)
    assert not any(tmp_path.iterdir())
