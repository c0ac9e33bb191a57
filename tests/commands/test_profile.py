"""`windlass profile RUN`: of a run that goes on, what it prints and leaves; and every request that it cannot serve."""

import json
import os
import threading
import time

import pytest

from tests import tiny
from windlass.commands.profile import profile
from windlass.errors import UserError
from windlass.report.events import read_events
from windlass.report.page.write import page_text
from windlass.supervise.heartbeat import Heartbeat, folder_of
from windlass.training import loop as page


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("profiled")


@pytest.fixture
def asked(monkeypatch):
    """asked(config, ...) trains while another thread asks for a profile; its request is in before step 4 -> what it printed."""
    monkeypatch.delenv("RANK", raising=False)

    def run(config, **request):
        steps, printed, beats = iter(range(1, 100)), [], []

        def ask():
            try:
                printed.extend(profile(config.run.directory, **request))
            except UserError as error:
                printed.append(error)

        def open_heartbeat(*args, original=page.open_heartbeat):
            beats.append(original(*args))
            return beats[0]

        def clip(*args, original=page.gradient_norm):
            if next(steps) == 3:
                thread.start()
                while not beats[0].profile_asked():
                    time.sleep(0.01)
            return original(*args)

        thread = threading.Thread(target=ask)
        monkeypatch.setattr(page, "gradient_norm", clip)
        monkeypatch.setattr(page, "open_heartbeat", open_heartbeat)
        page.train(config)
        thread.join()
        return printed

    return run


def test_a_run_that_goes_on_is_profiled_for_the_steps_asked_for(base, asked):
    config = tiny.recipe(base, "profiled")
    lines, directory = asked(config, steps=2), config.run.directory
    if isinstance(lines[0], UserError):
        raise lines[0]
    profiled = directory / "profiles" / "step-00000003-rank-0"
    assert lines[0] == "rank 0 on CPU, the mean of 2 steps: 4 to 5"
    assert [line[2:].split("  ")[0].strip() or line.split("  ")[2] for line in lines[1:5]] == [
        "step", "computing", "communication, not hidden", "idle: host, data, reads",
    ]  # fmt: skip
    assert any(line.startswith("  matrix products") for line in lines)
    assert lines[-1] == f"{profiled / 'trace.json.gz'}: open it in ui.perfetto.dev"
    events = list(read_events(directory / "events.jsonl"))
    assert [event["steps"] for event in events if event["kind"] == "profile"] == [[4, 5]]
    assert events[-1]["ledger"]["profile"] > 0, "its time is no training time"
    text = page_text(directory)
    assert "Profile of a step" in text and "rank 0, steps 4 to 5, " in text and "matrix products" in text


def test_a_profile_as_json_and_one_that_the_end_of_the_run_cuts_short(base, asked):
    config = tiny.recipe(base, "cut_short", run={"steps": 5})
    (line,) = asked(config, steps=100, in_json=True)
    found = json.loads(line)
    assert (found["first_step"], found["last_step"], found["rank"]) == (4, 5, 0)
    assert found["directory"] == str(config.run.directory / "profiles" / "step-00000003-rank-0")
    assert found["kinds"] and sum(row["seconds"] for row in found["kinds"]) <= found["step_s"]


def test_a_profile_that_the_rank_cannot_write_is_an_error_of_the_command_alone(base, asked):
    config = tiny.recipe(base, "unwritable")
    config.run.directory.mkdir()
    (config.run.directory / "profiles").write_text("a file")
    (error,) = asked(config, steps=2)
    assert "could not write its profile" in str(error) and "the disk is full" in str(error)


def refusal(*args, **more):
    with pytest.raises(UserError) as refused:
        list(profile(*args, **more))
    return str(refused.value)


def test_what_cannot_be_served_is_refused(tmp_path):
    assert "no rank of a run" in refusal(tmp_path, 5)
    with Heartbeat(folder_of(tmp_path), 3) as beat:
        for steps in (0, -1, 101):
            assert f"--steps {steps}" in refusal(tmp_path, steps)
        assert "the ranks of this run on this host are 3" in refusal(tmp_path, 5, rank=0)
        assert beat.profile_asked() == 0, "nothing was asked for"

        def end_of_the_run(_):
            beat.__exit__(None, None, None)

        assert "ended before a profile was written" in refusal(tmp_path, 5, wait=end_of_the_run)


def test_one_profile_at_a_time(tmp_path):
    with Heartbeat(folder_of(tmp_path), os.getpid() % 1000) as beat:
        waited = []

        def another_asks(_):
            waited.append(refusal(tmp_path, 2))
            beat.profile_answered()

        assert "could not write" in refusal(tmp_path, 5, wait=another_asks)
        assert "another profile of rank" in waited[0]
        assert beat.profile_asked() == 0
