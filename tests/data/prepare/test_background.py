"""A preparation in a process of its own: there in time for training, gone with who started it, and its errors reported."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.data.conftest import data_config
from tests.data.prepare.test_build import without_journal
from tests.data.prepare.test_prepare import content, quietly
from tests.data.sources.test_growing import DONE, put
from tests.data.sources.test_growing import filled as filled  # a fixture
from windlass import safe_text
from windlass.data.prepare.background import Background, start
from windlass.data.prepare.manifest import load_prepared
from windlass.data.shards.journal import open_journal
from windlass.errors import UserError

PATIENCE_S = 120.0


def until(condition):
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


@pytest.fixture
def open_source(filled, tmp_path):
    """The settings of a source that still grows: it has 55 of 60 files, so the last shards cannot be written."""
    (tmp_path / "src" / DONE).unlink()
    for number in range(55, 60):
        (tmp_path / "src" / f"{number:03}.txt").rename(tmp_path / f"{number:03}.txt")
    return data_config(tmp_path, **filled)


def complete(tmp_path):
    for number in range(55, 60):
        (tmp_path / f"{number:03}.txt").rename(tmp_path / "src" / f"{number:03}.txt")
    put(tmp_path / "src", DONE, "")


def test_it_is_back_when_the_first_window_is_there_and_goes_on(open_source, tmp_path):
    lines = []
    found = start(open_source, {}, lines.append)
    logged = open_journal(tmp_path / "grown")
    assert len(logged.shards) >= open_source.shuffle_window and logged.end is None
    assert (tmp_path / "grown" / "validation" / "index.json").is_file()
    complete(tmp_path)
    until(lambda: load_prepared(tmp_path / "grown") is not None)
    found.wait_until(lambda: False)
    plain = quietly(
        data_config(tmp_path, **{**open_source.model_dump(by_alias=True), "directory": str(tmp_path / "plain")})
    )
    assert without_journal(tmp_path / "grown") == without_journal(plain.directory)
    assert any(line.startswith("validation: ") for line in lines)
    lines.clear()
    start(open_source, {}, lines.append).wait_until(lambda: False)
    assert len(lines) == 1 and "skipped" in lines[0]


def test_errors_come_back_as_they_were_raised(corpus, tmp_path):
    config = data_config(tmp_path, order={"first_epoch": "written"}, sources=[{"path": str(tmp_path / "none")}])
    with pytest.raises(UserError, match="matches no file"):
        start(config, {}, print)
    config = data_config(tmp_path, order={"first_epoch": "written"})
    with pytest.raises(UserError, match="are not those that the run's checkpoint has read"):
        start(config, {}, lambda _: None, begun="another stream")
    assert not (tmp_path / "data").exists()


def test_it_keeps_the_secrets_of_who_started_it(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(safe_text, "_VALUES", set())
    safe_text.keep_secret("tOk3n")
    url = "http://127.0.0.1:9/tOk3n/x.jsonl"
    found = Background(data_config(tmp_path, sources=[{"path": url}]), {}, print, None)
    safe_text._VALUES.clear()  # what is hidden from here on is hidden by the process
    with pytest.raises(UserError) as caught:
        found.wait_until(lambda: False)
    assert caught.value.given.startswith("http://127.0.0.1:9/***/x.jsonl")


def test_a_process_that_is_killed_is_reported_by_its_exit_code(open_source, tmp_path):
    found = start(open_source, {}, lambda _: None)
    os.kill(found._process.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"ended with exit code -9 \(Killed, perhaps for memory\)") as caught:
        found.wait_until(lambda: False)
    assert "start again" in caught.value.change


def test_a_process_that_crashes_is_reported_by_its_last_line_and_promises_nothing(corpus, tmp_path, monkeypatch):
    broken = (
        "import windlass.data.prepare.background as room; "
        "room.prepare = lambda *_: {}['no such key']; room.run_preparation()"
    )
    monkeypatch.setattr("windlass.data.prepare.background._command", lambda: [sys.executable, "-c", broken])
    with pytest.raises(UserError) as caught:
        start(data_config(tmp_path, order={"first_epoch": "written"}), {}, print)
    assert caught.value.given.endswith("ended with exit code 1: KeyError: 'no such key'")
    assert "start again" not in caught.value.change and "traceback" in caught.value.change


def test_it_dies_with_who_started_it_and_another_goes_on(open_source, tmp_path):
    script = (
        "import sys, json; from pathlib import Path; from windlass.data.prepare.background import start; "
        "from windlass.data.config import DataConfig; "
        "found = start(DataConfig.model_validate_json(sys.stdin.read()), {}, lambda _: None); "
        "print(found._process.pid, flush=True); import time; time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    parent.stdin.write(open_source.model_dump_json(by_alias=True))
    parent.stdin.close()
    child = int(parent.stdout.readline())
    assert Path(f"/proc/{child}").exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not Path(f"/proc/{child}").exists())
    before = open_journal(tmp_path / "grown")
    complete(tmp_path)
    quietly(open_source)
    before.read()
    assert before.end is not None


@pytest.mark.long
def test_who_comes_second_waits_and_takes_over_where_the_first_dies(open_source, tmp_path):
    first = start(open_source, {}, lambda _: None)
    lines = []
    second = start(open_source, {}, lines.append)
    until(lambda: any("another process is preparing" in line for line in lines))
    threading.Timer(0.2, complete, [tmp_path]).start()
    first.stop()
    second.wait_until(lambda: False)
    assert load_prepared(tmp_path / "grown") is not None
    assert any("continuing after them" in line for line in lines)


@pytest.mark.long
def test_an_old_failure_is_not_taken_for_a_new_one(open_source, tmp_path):
    found = start(open_source, {}, lambda _: None)
    found.stop()
    (tmp_path / "grown" / "growing.beat").write_text('{"failed": ["old", "old", "old"]}')
    again = start(open_source, {}, lambda _: None)
    assert b"old" not in content(tmp_path / "grown").get(Path("growing.beat"), b"")
    again.stop()
