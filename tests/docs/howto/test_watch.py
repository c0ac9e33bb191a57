"""docs/howto/watch-a-run.md: its commands run on the runs of its pictures, in which all happens that it explains."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.docs.pages import commands_in, run_commands
from windlass.report.page.drawn_data import marks_of
from windlass.report.page.history import read_history
from windlass.status import write_status

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "howto" / "watch-a-run.md").read_text("utf-8")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "generate"))
    import invented_runs

    invented_runs.main(tmp_path)
    yield tmp_path
    sys.modules.pop("invented_runs", None)


def test_what_happens_in_the_run_of_the_picture_is_what_the_page_says(place):
    marks = marks_of(read_history(place / "runs/faster/events.jsonl"))
    kinds = [kind for _, kind, *_ in marks]
    assert kinds.count("resumed") == 3 and kinds.count("incident") == 1 and kinds.count("checkpoint") == 8
    assert [mark[2:] for mark in marks if mark[1] == "not finite"] == [
        ["loss not finite until step 1220", "loss", 1220],
        ["gradient norm not finite until step 1220", "gradient_norm", 1220],
    ]
    assert {kind for _, kind, *_ in marks_of(read_history(place / "runs/base/events.jsonl"))} == {
        "checkpoint", "validation", "end",
    }  # fmt: skip


def test_its_commands_run(place, monkeypatch, capsys):
    shutil.copytree(place / "runs/faster", place / "runs/mine")
    write_status(place / "runs/mine", "finished", 2000, 0)
    (place / "runs/mine/run.json").write_text('{"run_id": "0123456789abcdef"}')
    commands = [command for command in commands_in(PAGE) if "--serve" not in command]
    assert len(commands) == len(commands_in(PAGE)) - 1 == 5
    pytest.importorskip("tensorboard")
    run_commands(commands, None, place, monkeypatch, capsys)
    assert (place / "runs/mine/report.html").exists() and "2 runs" in (place / "compared.html").read_text("utf-8")


def test_its_pictures_are_there():
    pictures = re.findall(r"^!\[.+?\]\(\.\./(.+?)\)$", PAGE, re.M)
    assert pictures == ["pictures/watch-faults.png", "pictures/watch-two-runs.png", "pictures/watch-phone.png"]
    assert all((DOCS / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
