"""A run's id outlives a damaged file, and a run whose checkpoints are gone does not begin anew."""

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.hall.test_runtime import runtime_over
from windlass.checkpoint.commit import quarantined
from windlass.errors import UserError
from windlass.report.events import EventLog
from windlass.training.parts.open_checkpoints import _run_id, check_saved_is_there, open_checkpoints
from windlass.training.preflight import make_ready


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"run_id": 7}', b'{"run_id": "../x"}', b"\xff"])
def test_a_damaged_run_json_is_replaced_and_the_run_goes_on(tmp_path, content):
    file, said = tmp_path / "run.json", []
    file.write_bytes(content)
    run_id = _run_id(file, said.append)
    assert len(run_id) == 16 and json.loads(file.read_text()) == {"run_id": run_id}
    assert len(said) == 1 and said[0].startswith(f"{file} is damaged: the run has a new id")
    assert _run_id(file, pytest.fail) == run_id


def no_checkpoints(config):
    with pytest.raises(UserError) as caught:
        open_checkpoints(config, runtime_over(None), print, None)
    return str(caught.value)


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(ranks, tmp_path):
    config = tiny.recipe(tmp_path)
    events = config.run.directory / "events.jsonl"
    make_ready(config, 1, "cpu")
    log = EventLog(events)
    for kind, step in (("start", 0), ("step", 1), ("checkpoint", 3), ("step", 4), ("checkpoint", 6)):
        log.write(kind, step, {})
    before, prepared = events.read_bytes(), (Path(config.data.directory) / "prepared.json").read_bytes()
    (Path(config.data.sources[0].path) / "more.txt").write_text("A new text, which would be prepared. " * 50)
    for said in (*ranks.run(1, tiny.refusal, config), *ranks.run(2, no_checkpoints, config)):
        assert f"{config.run.directory} has saved step 6, by its events.jsonl, and " in said
        assert "is their storage mounted" in said and "another run.directory" in said
    assert events.read_bytes() == before and not (config.run.directory / "checkpoints").exists()
    assert (Path(config.data.directory) / "prepared.json").read_bytes() == prepared, "its data is still the lost run's"


def test_a_run_that_saved_nothing_or_whose_checkpoints_were_put_aside_begins(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    check_saved_is_there(tmp_path)
    (tmp_path / "events.jsonl").write_text('{"kind": "step", "step": 3}\n{"kind": "checkpoint", "st')
    check_saved_is_there(tmp_path)
    (tmp_path / "events.jsonl").write_text('{"kind": "checkpoint", "step": 3}\n')
    with pytest.raises(UserError, match="has saved step 3"):
        check_saved_is_there(tmp_path)
    checkpoints.mkdir()
    with pytest.raises(UserError, match="has saved step 3"):
        check_saved_is_there(tmp_path)
    (checkpoints / "step-00000003.corrupt").mkdir()
    assert quarantined(checkpoints)
    check_saved_is_there(tmp_path)
