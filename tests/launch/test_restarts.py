"""Which failures are tried again: the table of windlass.errors, a number of times, never one step for the fourth time."""

import errno
import fcntl
import os

import pytest

from windlass.commands.status import status
from windlass.launch.restarts import Failure, Restarts
from windlass.status import read_status, write_status
from windlass.supervise.incident import Incident
from windlass.supervise.watchdog import UNSEEN_S


def failure(code=137, step=None, position=0):
    return Failure(code, Incident("died", [1], step, "step", exit_code=-9), position)


@pytest.mark.parametrize("code", [1, 5, 7, 74, 134, 137, 139])
def test_what_may_pass_is_tried_again(code):
    restarts = Restarts(1, 0)
    assert restarts.why_not(failure(code, 1)) is None and restarts.count == 1
    assert restarts.why_not(failure(code, 2)) == (
        "the ranks are not started again after 1 restarts (launch.max_restarts=1)"
    )


@pytest.mark.parametrize("code", [2, 3, 4, 75, 130])
def test_what_only_the_user_can_mend_and_what_was_asked_to_end_is_not(code):
    assert Restarts(3, 0).why_not(failure(code, 1)) == ""


def test_each_start_has_deadlines_of_its_own_or_none():
    restarts = Restarts(3, 180, 600)
    assert restarts.deadlines() is not restarts.deadlines() and Restarts(3, 0).deadlines() is None
    assert restarts.deadlines().of("data") == UNSEEN_S and Restarts(3, 180, 7200).deadlines().of("data") == 7380


def test_none_is_none_and_nothing_is_said_about_it():
    assert Restarts(0, 0).why_not(failure()) == ""


def test_a_step_that_fails_three_times_is_named_with_its_samples():
    restarts = Restarts(10, 0, 0, lambda position: f"samples up to {position}")
    said = [restarts.why_not(failure(1, step, 8 * step)) for step in (4, 4, 6, 6, 6)]
    assert said == [None] * 4 + ["three failures in step 7: the ranks are not started again\nsamples up to 48"]
    before = Restarts(10, 0, 0, lambda position: "never asked")
    assert [before.why_not(failure(1)) for _ in range(3)][2] == (
        "three failures before the first step: the ranks are not started again"
    )


def test_while_ranks_start_again_the_run_goes_on_and_one_launcher_says_so(tmp_path, capsys):
    """Ranks that died may have written that the run failed, and nobody holds its lock then."""
    write_status(tmp_path, "failed", 6, 1)
    restarts, other = Restarts(3, 0), Restarts(3, 0)
    for one in (restarts, restarts, other):
        one.why_not(failure())
        one.again(tmp_path)
        assert (status(tmp_path).state, status(tmp_path).step) == ("running", 6)
    assert capsys.readouterr().err.splitlines()[:2] == [
        f"windlass: restart {number} of 3, from the last commit" for number in (1, 2)
    ]
    restarts._held.close()
    assert status(tmp_path).state == "dead", "as after a kill of the launcher"


def test_where_no_rank_begins_again_the_run_has_failed_as_before(tmp_path):
    """After a Ctrl-C, or a mistake that is found, while ranks start again."""
    write_status(tmp_path, "failed", 6, 1)
    restarts = Restarts(3, 0)
    restarts.again(tmp_path)
    restarts.close()
    assert (status(tmp_path).state, status(tmp_path).exit_code) == ("failed", 1)
    restarts.again(tmp_path)
    write_status(tmp_path, "finished", 9, 0)
    restarts.close()
    assert status(tmp_path).state == "finished"


def test_a_run_that_had_not_failed_before_a_restart_is_left_as_it_is(tmp_path):
    """Ranks that were killed had no time to write that they failed: `windlass status` says that the run is dead."""
    write_status(tmp_path, "running", 6, None)
    restarts = Restarts(3, 0)
    restarts.again(tmp_path)
    restarts.close()
    assert (read_status(tmp_path).state, status(tmp_path).state) == ("running", "dead")


def test_a_file_system_without_locks_keeps_nobody_from_starting_again(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    write_status(tmp_path, "failed", 6, 1)
    monkeypatch.setattr(fcntl, "flock", refused)
    restarts = Restarts(3, 0)
    restarts.again(tmp_path)
    restarts.close()
    assert read_status(tmp_path).state == "running"
