"""events.jsonl: what is written, what survives a kill, which lines count after a resume."""

import errno
import json
import math
import os
import shutil
import time

import pytest

from windlass.errors import UserError
from windlass.report import events
from windlass.report.events import EventLog, read_events, read_lines


def write(path, *lines):
    log = EventLog(path)
    for kind, step, fields in lines:
        log.write(kind, step, fields)


def test_a_line_has_kind_time_step_and_its_fields(tmp_path):
    before_s = time.time()
    write(tmp_path / "run" / "events.jsonl", ("step", 3, {"loss": 1.5, "sets": ("a", 2)}))
    (line,) = [json.loads(row) for row in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert before_s <= line.pop("time") <= time.time()
    assert line == {"kind": "step", "step": 3, "loss": 1.5, "sets": ["a", 2]}


def test_a_line_holds_no_secret_of_a_url_and_no_control_character_but_what_a_model_wrote_stays(tmp_path):
    given = {"drift": ["https://h/x?sig=51gn"], "what": "\x1b[2J\x9b\udcff"}
    sample = {"prompt": "", "text": "see https://h/x?a=b \x1b\x9b\u202e"}
    write(tmp_path / "e", ("incident", 1, given), ("sample", 1, sample))
    text = (tmp_path / "e").read_text("utf-8")
    assert "51gn" not in text and text.replace("\n", "").isprintable()
    incident, found = read_events(tmp_path / "e")
    assert incident["drift"] == ["https://h/x?***"] and incident["what"] == given["what"]
    assert found["text"] == sample["text"]


def test_non_finite_numbers_become_null_and_are_named(tmp_path):
    fields = {"loss": math.nan, "gradient_norm": -math.inf, "ledger": {"training": math.inf}, "targets": 4}
    write(tmp_path / "e", ("step", 1, fields), ("step", 2, {"loss": 1.0}))
    text = (tmp_path / "e").read_text()
    assert "NaN" not in text and "Infinity" not in text
    bad, good = read_events(tmp_path / "e")
    assert bad["loss"] is None and bad["gradient_norm"] is None and bad["ledger"] == {"training": None}
    assert bad["non_finite"] == {"loss": "nan", "gradient_norm": "-inf", "ledger.training": "inf"}
    assert bad["targets"] == 4 and "non_finite" not in good


def test_a_line_is_on_disk_when_write_returns(tmp_path):
    log = EventLog(tmp_path / "e")
    log.write("start", 0, {})
    assert len(read_events(tmp_path / "e")) == 1  # the log is still open


def test_a_torn_last_line_is_left_out_and_mended_at_reopening(tmp_path):
    path = tmp_path / "e"
    write(path, ("step", 1, {}), ("step", 2, {}))
    whole = path.read_bytes()
    for cut in range(1, len(whole) // 2):
        path.write_bytes(whole[:-cut])
        assert [line["step"] for line in read_events(path)] == [1]
        write(path, ("resume", 1, {}))
        assert [(line["kind"], line["step"]) for line in read_events(path)] == [("step", 1), ("resume", 1)]


def test_text_of_any_language_and_line_separators_keep_one_line(tmp_path):
    text = "a\nb\r\u2028\u0085</script> é 字"
    write(tmp_path / "e", ("sample", 1, {"text": text}), ("end", 1, {}))
    assert read_events(tmp_path / "e")[0]["text"] == text


def test_a_resume_voids_earlier_lines_beyond_its_step_only(tmp_path):
    path = tmp_path / "e"
    steps = [("step", step, {"try": 1}) for step in (1, 2, 3, 4)]
    write(
        path, ("start", 0, {}), *steps, ("resume", 2, {}), ("step", 3, {"try": 2}), ("resume", 3, {}), ("step", 4, {})
    )
    logged = [(line["kind"], line["step"], line.get("try")) for line in read_events(path)]
    assert logged == [
        ("start", 0, None), ("step", 1, 1), ("step", 2, 1), ("resume", 2, None),
        ("step", 3, 2), ("resume", 3, None), ("step", 4, None),
    ]  # fmt: skip
    assert len(read_lines(path)) == 9


def test_a_second_start_voids_what_was_trained_before_it(tmp_path):
    write(tmp_path / "e", ("start", 0, {}), ("step", 1, {}), ("start", 0, {}), ("step", 1, {"again": True}))
    assert [line["kind"] for line in read_events(tmp_path / "e")] == ["start", "start", "step"]


def test_a_bad_line_is_named(tmp_path):
    (tmp_path / "e").write_text(
        '{"kind": "step", "time": 1, "step": 1}\n{"kind": "st\n{"kind": "end", "time": 1, "step": 1}\n'
    )
    with pytest.raises(UserError) as error:
        read_events(tmp_path / "e")
    assert "line 2" in error.value.given and "delete line 2" in error.value.change


@pytest.mark.parametrize(
    "row", ["[1]", '{"kind": "step"}', "7", '{"kind": "step", "time": 1, "step": 1, "gradient_norm": []}']
)
def test_a_json_line_that_is_no_event_is_named(tmp_path, row):
    (tmp_path / "e").write_text(row + "\n")
    with pytest.raises(UserError, match="line 1"):
        read_events(tmp_path / "e")


def test_a_validation_that_lost_its_name_or_its_loss_ends_no_run(tmp_path):
    path = tmp_path / "events.jsonl"
    whole = '{"kind": "validation", "time": 1, "step": 4, "name": "validation", "loss": 2.5}'
    no_name, no_loss = whole.replace("name", "nema"), whole.replace("loss", "ssol")
    path.write_text("\n".join([no_name, no_loss, whole]) + "\n")
    assert [line["loss"] for line in events.past_validations(path).pop("validation")] == [2.5]


@pytest.mark.parametrize(
    ("losses", "kept"),
    [
        ([7.0], [0]),
        ([7.0, 3.0], [0, 1]),
        ([7.0, 3.0, 2.0, 4.0, 2.0, 5.0], [0, 2, 5]),
        ([1.0, 3.0, 2.0], [0, 2]),
        ([None, float("nan"), 2.0, None], [0, 2, 3]),
    ],
)
def test_of_the_validations_the_first_the_lowest_and_the_last_are_kept(losses, kept):
    seen = []
    for step, loss in enumerate(losses):
        seen = events.first_lowest_last([*seen, {"step": step, "loss": loss}])
    assert [one["step"] for one in seen] == kept


def test_a_directory_in_its_place_is_reported_and_ends_no_run(tmp_path):
    said, path = [], tmp_path / "events.jsonl"
    path.mkdir()
    log = EventLog(path, said.append)
    log.write("incident", 1, {"what": "x"})
    assert said == [f"{path} cannot be written (Is a directory): training goes on, and the lines wait in memory"]
    path.rmdir()
    log.write("incident", 2, {"what": "y"})
    assert [line["step"] for line in read_lines(path)] == [1, 2]


def test_a_run_without_events_is_a_user_error(tmp_path):
    with pytest.raises(UserError) as error:
        read_events(tmp_path / "none" / "events.jsonl")
    assert "does not exist" in error.value.given and "run.directory" in error.value.change


def test_an_unknown_kind_is_our_own_bug(tmp_path):
    log = EventLog(tmp_path / "e")
    with pytest.raises(AssertionError, match="stp"):
        log.write("stp", 1, {})


class FullDisk:
    """A file that takes `room` bytes more."""

    def __init__(self, file, state):
        self.file, self.state = file, state

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, data):
        taken = data[: self.state["room"]]
        self.state["room"] -= len(taken)
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(taken)


def fill_disk(monkeypatch, state):
    """From here on the log's disk takes `state["room"]` bytes more."""
    real = open
    monkeypatch.setattr(events, "open", lambda *a, **more: FullDisk(real(*a, **more), state), raising=False)


def test_a_full_disk_keeps_lines_in_memory_says_so_once_and_loses_none(tmp_path, monkeypatch):
    said, state = [], {"room": 1 << 20}
    log = EventLog(tmp_path / "e", said.append)
    fill_disk(monkeypatch, state)
    log.write("start", 0, {})
    state["room"] = 20
    for step in (1, 2, 3):
        log.write("step", step, {})
    assert [line["kind"] for line in read_events(tmp_path / "e")] == ["start"], "no torn line is left in the middle"
    assert (tmp_path / "e").read_bytes().endswith(b"}\n")
    assert len(said) == 1 and said[0].startswith(
        f"{tmp_path / 'e'} cannot be written (No space left on device): training goes on"
    )
    assert log.disk_filled
    state["room"] = 1 << 20
    log.write("step", 4, {})
    assert [line["step"] for line in read_events(tmp_path / "e")] == [0, 1, 2, 3, 4]
    assert said[1:] == [f"{tmp_path / 'e'} is written again"]


def test_what_waits_is_bounded_and_the_oldest_goes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "KEPT_LINES", 3)
    state = {"room": 0}
    log = EventLog(tmp_path / "e", lambda sentence: None)
    fill_disk(monkeypatch, state)
    for step in range(5):
        log.write("step", step, {})
    state["room"] = 1 << 20
    log.write("end", 5, {})
    assert [line["step"] for line in read_events(tmp_path / "e")] == [3, 4, 5]


def test_a_directory_that_was_deleted_is_made_again(tmp_path):
    log = EventLog(tmp_path / "run" / "e", pytest.fail)
    assert not log.disk_filled
    log.write("start", 0, {})
    shutil.rmtree(tmp_path / "run")
    log.write("step", 1, {})
    assert [line["step"] for line in read_events(tmp_path / "run" / "e")] == [1]
