"""Ranks on several hosts: what is refused before hosts meet, and how one ends. Whole runs: test_nodes_in_namespaces."""

import pytest

from windlass.cli.arguments import endpoint_of
from windlass.contract import exit_code_of_stop
from windlass.errors import EXIT_STOPPED, UserError
from windlass.launch import nodes as room
from windlass.launch.nodes import check_worlds, nodes_of
from windlass.launch.restarts import Failure, Restarts
from windlass.report.events import read_lines
from windlass.status import write_status
from windlass.supervise.incident import Incident


@pytest.mark.parametrize(("text", "found"), [("3", (3, 3)), ("2:3", (2, 3)), ("1:1", (1, 1)), ("3:4", (3, 4))])
def test_numbers_of_hosts(text, found):
    assert nodes_of(text) == found


@pytest.mark.parametrize(
    ("text", "rule", "change"),
    [
        (
            "1:2",
            "MIN must be more than half of MAX, or hosts that lose each other could train on as two runs",
            "--nodes 2:2",
        ),
        (
            "2:4",
            "MIN must be more than half of MAX, or hosts that lose each other could train on as two runs",
            "--nodes 3:4",
        ),
        ("3:2", "MIN is not more than MAX", "--nodes 2:3"),
        *(
            (wrong, "a number of hosts from 1, or two: MIN:MAX", "--nodes 3:4")
            for wrong in ("0", "0:1", "two", "2:", "")
        ),
    ],
)
def test_what_is_no_number_of_hosts_is_refused(text, rule, change):
    with pytest.raises(UserError) as caught:
        nodes_of(text)
    assert caught.value.given == f"--nodes {text}" and rule in caught.value.rule and change in caught.value.change


@pytest.mark.parametrize(
    "text", ["", "node-1", "node-1:", ":29400", "node-1:port", "node-1:0", "node-1:70000", "::1:29400"]
)
def test_an_endpoint_without_host_or_port_is_refused(text):
    with pytest.raises(UserError) as caught:
        endpoint_of(text)
    assert caught.value.given == f"--endpoint {text}" and "HOST:PORT" in caught.value.rule
    assert [endpoint_of(fine) for fine in ("node-1:29400", "[::1]:29400")] == ["node-1:29400", "[::1]:29400"]


def test_a_layout_that_some_number_of_hosts_cannot_hold_is_refused_before_they_meet():
    asked = []

    def check(world):
        asked.append(world)
        if world % 4:
            raise UserError(f"parallel.tp=4 on {world} ranks", "a rule", "a change")

    with pytest.raises(UserError) as caught:
        check_worlds(nodes_of("2:3"), 2, check)
    assert asked == [4, 6] and caught.value.given == "3 hosts with 2 ranks each: parallel.tp=4 on 6 ranks"
    assert caught.value.change == "a change; or another --nodes"
    check_worlds(nodes_of("3:4"), 4, check)
    assert asked == [4, 6, 12, 16]


def test_ranks_of_our_own_launchers_never_end_with_0_by_a_signal():
    one, torchrun = {"WINDLASS_AGENT_PID": "7"}, {"TORCHELASTIC_RUN_ID": "run"}
    several = {**one, **torchrun, "WINDLASS_RANKS_PER_HOST": "2"}
    assert [exit_code_of_stop(True, environ) for environ in (torchrun, one, several)] == [0, *[EXIT_STOPPED] * 2]


def test_a_host_whose_rank_does_not_leave_ends_as_the_run_did_and_starts_nothing_again(tmp_path, monkeypatch):
    lingers = Incident("lingers", [3], 9, "end", waited_s=301.0)
    ended = []

    class Meeting:
        start, watch, end = dict, object, lambda self, code: ended.append(code) or code

    states = {"finished": 0, "stopped": 75}

    def start_ranks(*_):
        state = list(states)[len(ended)]
        write_status(tmp_path, state, 9, states[state])
        return Failure(137, lingers)

    monkeypatch.setenv("WINDLASS_RANKS_PER_HOST", "2")
    monkeypatch.setattr(room, "start_ranks", start_ranks)
    (tmp_path / "events.jsonl").write_text("")
    for code in states.values():
        assert room._start(Meeting(), [], nodes_of("2"), tmp_path, Restarts(3, 180.0), 0.0) == code
    assert ended == [0, 75]
    assert [(line["cause"], line["ranks"]) for line in read_lines(tmp_path / "events.jsonl")] == [("lingers", [3])] * 2


@pytest.mark.parametrize(
    ("codes", "said", "ended"),
    [
        ([2], "", [2]),  # a mistake of the user's ends all hosts at once
        ([137, 137, 137], "three failures in step 10: the ranks are not started again", [137]),
        ([137, 1], "the ranks are not started again after 1 restarts (launch.max_restarts=1)", [1]),
    ],
)
def test_failures_on_several_hosts_end_by_the_table_as_on_one(tmp_path, monkeypatch, capsys, codes, said, ended):
    """`_start` is called again as long as it says nothing; what it says ends the run on every host."""
    found, left = [], iter(codes)

    class Meeting:
        start, watch, end = dict, object, lambda self, code: found.append(code) or code

        def is_first(self, _what):
            return True

    steps = iter([9] * 3 if len(codes) == 3 else [9, 11])

    def start_ranks(*_):
        return Failure(next(left), Incident("died", [1], next(steps), "step", exit_code=1))

    monkeypatch.setenv("WINDLASS_RANKS_PER_HOST", "2")
    monkeypatch.setattr(room, "start_ranks", start_ranks)
    (tmp_path / "events.jsonl").write_text("")
    restarts = Restarts(1 if len(codes) == 2 else 5, 180.0)
    answers = [room._start(Meeting(), [], nodes_of("2"), tmp_path, restarts, 0.0) for _ in codes]
    restarts.close()
    assert answers == [None] * (len(codes) - 1) + ended and found == ended
    assert said in capsys.readouterr().err
    lines = [line["restart"] for line in read_lines(tmp_path / "events.jsonl")]
    assert lines == [*range(1, len(codes)), None], "the last one is followed by no restart"
