"""Deadlines learned from a run, by a clock of the test's; whom a stall is blamed on."""

import math
import random
from dataclasses import replace

import pytest

from windlass.status import write_status
from windlass.supervise import watchdog
from windlass.supervise.heartbeat import PHASES, LastBeat
from windlass.supervise.rank_stacks import Collective, RankStack
from windlass.supervise.watchdog import LEAVE_S, UNSEEN_S, Deadlines, Watchdog, to_blame


def beat(rank=0, step=1, phase="step", time_s=0.0, pid=None):
    return LastBeat(pid or 100 + rank, rank, step, 0, time_s, phase)


def stack(rank=0, step=1, phase="step", collectives=(), state=""):
    return RankStack(beat(rank, step, phase), 1.0, (), tuple(collectives), state)


def test_of_ranks_as_far_as_each_other_the_one_at_work_is_to_blame():
    at_work, waits = ("lib/python3.11/pathlib.py:9 open",), ("a/b/d.py:9 recv", "windlass/ranks/tree.py:98 _receive")
    looks = ("windlass/ranks/host_page.py:60 after", "windlass/training/loop.py:109 loop")

    def of(*frames):
        return [replace(stack(rank), frames=held) for rank, held in enumerate(frames)]

    assert to_blame(of(waits, at_work, looks)) == [1]
    assert to_blame(of(waits, (), looks)) == [1], "the kernel holds it: it did not answer"
    assert to_blame(of(waits, looks)) == [0, 1] == to_blame(of(at_work, at_work))


def test_a_phase_may_take_ten_times_the_longest_seen_and_an_hour_before():
    deadlines = Deadlines(least_s=5)
    assert deadlines.of("step") == UNSEEN_S
    deadlines.learn([beat(step=1, phase="step", time_s=100)])
    deadlines.learn([beat(step=1, phase="record", time_s=102)])
    assert deadlines.of("step") == 20 and deadlines.of("record") == UNSEEN_S
    deadlines.learn([beat(step=2, phase="step", time_s=102.1)])
    assert deadlines.of("record") == 5, "never below the least"
    deadlines.learn([beat(step=2, phase="data", time_s=103)])
    assert deadlines.of("step") == 20, "the longest counts, not the last"
    assert deadlines.late([beat(phase="step", time_s=10)], 30) == []
    assert deadlines.late([late := beat(phase="step", time_s=10)], 30.1) == [late]
    for phase in ("start", "end"):
        assert deadlines.late([beat(phase=phase, time_s=0)], 1e9) == [], "its own deadlines, and none"


def test_waiting_for_data_is_left_to_the_deadline_of_the_data():
    deadlines = Deadlines(least_s=5, data_s=600)
    deadlines.learn([beat(step=1, phase="data", time_s=100)])
    deadlines.learn([beat(step=1, phase="step", time_s=100.1)])
    assert (
        deadlines.of("data") == 600
        and Deadlines(5, math.inf).of("data") == math.inf
        and deadlines.of("step") == UNSEEN_S
    )


def test_the_ranks_of_a_new_start_are_not_measured_from_the_beats_of_the_last():
    deadlines = Deadlines(least_s=1)
    deadlines.learn([beat(phase="step", time_s=10, pid=7)])
    deadlines.learn([beat(phase="start", time_s=500, pid=8)])
    assert deadlines.of("step") == UNSEEN_S


def test_no_alarm_in_5000_steps_of_a_loaded_host_and_one_at_the_stall():
    """Phases take what they take times 1 to 9, as on a host with other work; the watchdog looks once a second."""
    draw, now_s, looked_s, least_s = random.Random(5), 0.0, 0.0, 1.0
    deadlines, usual_s = Deadlines(least_s), {"data": 0.01, "step": 0.5, "record": 0.02}
    for step in range(5000):
        for phase, seconds in usual_s.items():
            last = beat(step=step, phase=phase, time_s=now_s)
            now_s += seconds * draw.uniform(1, 9)
            while looked_s < now_s:
                deadlines.learn([last])
                assert not deadlines.late([last], looked_s), step
                looked_s += 1.0
    assert not deadlines.late([last], now_s + least_s * 0.9) and deadlines.late([last], now_s + 46)


def test_a_phase_that_is_too_short_to_be_seen_is_known_by_what_ranks_measure():
    """A look per second sees the end of no phase of milliseconds: without their word it would have an hour."""
    deadlines = Deadlines(least_s=180)
    longest_s = dict.fromkeys(PHASES, 0.0) | {"record": 0.004, "update": 0.02, "step": 0.07, "checkpoint": 900.0}
    deadlines.learn([beat()._replace(longest_s=tuple(longest_s.values()))])
    assert [deadlines.of(phase) for phase in ("record", "update", "step")] == [180] * 3
    assert [deadlines.of(phase, is_one_host=True) for phase in ("record", "update", "step")] == [180, 60, 70]
    assert deadlines.of("checkpoint") == UNSEEN_S, "so long a one is seen, if it is one and the rank was not stopped"
    assert deadlines.of("evaluate") == UNSEEN_S
    quick = Deadlines(least_s=5)
    quick.learn([beat()._replace(longest_s=tuple(longest_s.values()))])
    assert quick.of("update", is_one_host=True) == 5, "never over what the recipe says"
    slow = Deadlines(least_s=180)
    slow.learn([beat()._replace(longest_s=tuple((longest_s | {"update": 0.9}).values()))])
    assert slow.of("update", is_one_host=True) == 180


def test_while_the_rank_that_others_wait_for_is_in_time_none_is_late():
    deadlines = Deadlines(least_s=5, data_s=600)
    deadlines.learn([beat(0, 1, "step", 0.0), beat(1, 1, "data", 0.0)])
    deadlines.learn([beat(0, 1, "record", 0.5), beat(1, 1, "step", 0.5)])
    waits, reads = beat(0, 2, "step", 10.0), beat(1, 2, "data", 10.0)
    assert deadlines.late([waits], 100) == [waits]
    assert deadlines.late([waits, reads], 100) == [] and deadlines.late([waits, reads], 611) == [reads]
    starts = beat(1, 0, "start", 10.0)
    assert deadlines.late([waits, starts], 100) == [waits], "one without a deadline hides no other"


class RankOfATest:
    """A rank's page, by the test's clock: as Heartbeat writes it."""

    def __init__(self, rank):
        self.last = beat(rank, 0, "start")
        self.longest_s = dict.fromkeys(PHASES, 0.0)

    def begin(self, phase, step, now_s):
        before = self.last
        self.longest_s[before.phase] = max(self.longest_s[before.phase], now_s - before.time_s)
        self.last = LastBeat(before.pid, before.rank, step, 0, now_s, phase, tuple(self.longest_s.values()))


def test_no_alarm_in_5000_loaded_steps_of_milliseconds_with_pauses_and_one_at_the_stall(tmp_path, monkeypatch):
    """Two ranks whose phases take 1 to 9 times their milliseconds, on a host that stops for up to 40 s once in 200 steps. The
    watchdog itself looks, once a second. Then rank 1 hangs, and rank 0 waits for it."""
    draw, now_s, looked_s, pauses = random.Random(7), 0.0, 0.0, 0
    ranks, clock = [RankOfATest(0), RankOfATest(1)], [0.0]
    monkeypatch.setattr(watchdog, "read_beats", lambda run: [rank.last for rank in ranks])
    monkeypatch.setattr(LastBeat, "is_alive", property(lambda self: True))
    monkeypatch.setattr(
        watchdog, "find_stacks", lambda run, beats, clock: [RankStack(b, clock() - b.time_s) for b in beats]
    )
    looks = Watchdog(tmp_path, deadlines := Deadlines(180.0, 780.0), lambda *_: None, lambda: clock[0])

    def go_on(seconds):
        nonlocal now_s, looked_s
        now_s += seconds
        while looked_s + 1 < now_s:
            looked_s += 1.0
            clock[0] = looked_s
            found = looks.look()
            if found is not None:
                return found
        return None

    for step in range(5000):
        for phase, seconds in {"data": 0.001, "step": 0.01, "update": 0.002, "record": 0.001}.items():
            for rank in draw.sample(ranks, 2):
                rank.begin(phase, step + (phase == "record"), now_s)
                assert go_on(seconds * draw.uniform(0.5, 4.5)) is None, (step, phase)
            if draw.random() < 1 / 800:
                pauses += 1
                assert go_on(draw.uniform(5, 40)) is None, (step, phase)
    assert pauses == 24
    assert all(deadlines.of(phase, True) <= 10 * 41 for phase in ("step", "update", "record")), "none has an hour"
    ranks[0].begin("update", 5000, now_s)
    ranks[1].begin("step", 5000, begun_s := now_s)
    found = go_on(500)
    assert (found.ranks, found.phase) == ([1], "step")
    assert 0 < looked_s - begun_s - deadlines.of("step", True) <= 1


def test_a_hang_in_an_update_of_milliseconds_is_seen_after_a_minute_and_on_several_hosts_after_the_recipes(
    tmp_path, monkeypatch
):
    ranks, clock = [RankOfATest(0), RankOfATest(1)], [0.0]
    monkeypatch.setattr(watchdog, "read_beats", lambda run: [rank.last for rank in ranks])
    monkeypatch.setattr(LastBeat, "is_alive", property(lambda self: True))
    monkeypatch.setattr(
        watchdog, "find_stacks", lambda run, beats, clock: [RankStack(b, clock() - b.time_s) for b in beats]
    )

    class Others:
        def is_asked(self):
            return False

        def exchange(self, own):
            return list(own)

    def seconds_until_named(others):
        looks = Watchdog(tmp_path, Deadlines(180.0), lambda *_: None, lambda: clock[0], others)
        for step in range(3):
            for number, phase in enumerate(("data", "step", "update", "record")):
                for rank in ranks:
                    rank.begin(phase, step + (phase == "record"), clock[0] + number / 1000)
            looks.look()
            clock[0] += 1
        ranks[0].begin("record", 4, clock[0])
        ranks[1].begin("update", 3, begun_s := clock[0])
        while (found := looks.look()) is None:
            clock[0] += 1
        assert (found.ranks, found.phase, found.number) == ([1], "update", 4)
        return clock[0] - begun_s

    assert seconds_until_named(None) == 61
    ranks[:] = RankOfATest(0), RankOfATest(1)
    assert seconds_until_named(Others()) == 181


ALL_REDUCE = ("0", 5, "gloo:all_reduce", False)


@pytest.mark.parametrize(
    ("stacks", "blamed"),
    [
        ([stack(0, 8, "step"), stack(1, 8, "data")], [1]),
        # a step is completed before `record`: of one number that comes before the next batch
        ([stack(0, 8, "data"), stack(1, 8, "record"), stack(2, 8, "data")], [1]),
        ([stack(0, 8, "step"), stack(1, 8, "checkpoint"), stack(2, 8, "evaluate")], [2]),
        ([stack(0), stack(1, state="stopped (SIGSTOP)")], [1]),
        ([stack(0, 9, state="stopped (SIGSTOP)"), stack(1, 3)], [0]),
        ([stack(0, 9, state="waits for a disk or a network file system (state D)"), stack(1, 3)], [1]),
        ([stack(0, collectives=[Collective(*ALL_REDUCE)]), stack(1, collectives=[Collective("0", 4, "x", True)])], [1]),
        # of two groups, those of pipeline stages, only one is shared
        (
            [
                stack(0, collectives=[Collective("1", 9, "x", True), Collective("0", 4, "x", True)]),
                stack(1, collectives=[Collective("0", 5, "x", False), Collective("2", 2, "x", True)]),
            ],
            [0],
        ),
        ([stack(0, collectives=[Collective(*ALL_REDUCE)]), stack(1, collectives=[Collective(*ALL_REDUCE)])], [0, 1]),
        # two groups of two: 3 has not begun what 2 waits for, so 2 has not come to where 0 waits for it
        (
            [
                stack(0, collectives=[Collective("a", 6, "x", False)]),
                stack(1, collectives=[Collective("b", 6, "x", False)]),
                stack(2, collectives=[Collective("c", 9, "x", False), Collective("a", 5, "x", True)]),
                stack(3, collectives=[Collective("b", 5, "x", True), Collective("c", 8, "x", True)]),
            ],
            [3],
        ),
        # stages of a pipeline send and receive different numbers of times
        (
            [
                stack(0, collectives=[Collective("pp", 4, "nccl:send 0->1", True, True), Collective(*ALL_REDUCE)]),
                stack(
                    1, collectives=[Collective("pp", 9, "nccl:recv 1<-0", True, True), Collective("0", 4, "x", True)]
                ),
            ],
            [1],
        ),
        ([stack(0), stack(1)], [0, 1]),
    ],
)
def test_the_one_to_blame_is_the_one_that_the_others_wait_for(stacks, blamed):
    assert to_blame(stacks) == blamed


def test_a_look_learns_and_names_what_stalls(tmp_path, monkeypatch):
    beats, clock = [], [0.0]
    monkeypatch.setattr(watchdog, "read_beats", lambda run: list(beats))
    monkeypatch.setattr(LastBeat, "is_alive", property(lambda self: self.pid != 0))
    monkeypatch.setattr(
        watchdog, "find_stacks", lambda run, beats, clock: [RankStack(b, clock() - b.time_s) for b in beats]
    )
    looks = Watchdog(tmp_path, Deadlines(5.0), lambda *_: None, lambda: clock[0])
    assert looks.look() is None, "no rank has begun"
    for step in range(4):
        clock[0] = float(step)
        beats[:] = [beat(rank, step, "step", clock[0]) for rank in range(2)]
        assert looks.look() is None
    beats[:] = [beat(0, 4, "record", 3.5), beat(1, 3, "step", 3.0)]
    clock[0] = 12.9
    assert looks.look() is None
    clock[0] = 13.1
    found = looks.look()
    assert (found.cause, found.ranks, found.step, found.phase) == ("stalled", [1], 3, "step")
    assert found.waited_s == pytest.approx(10.1) and [p.beat.rank for p in found.stacks] == [0, 1]
    beats[:] = [beat(1, 3, "step", 3.0, pid=None)._replace(pid=0)]
    assert looks.look() is None, "a dead rank does not stall: the launcher sees it"


def test_ranks_that_do_not_leave_are_named_once_the_run_has_ended_and_not_before(tmp_path, monkeypatch):
    clock, beats = [0.0], [beat(0, 9, "end"), beat(1, 9, "end"), beat(2, 9, "end")]
    monkeypatch.setattr(watchdog, "read_beats", lambda run: list(beats))
    monkeypatch.setattr(LastBeat, "is_alive", property(lambda self: True))
    monkeypatch.setattr(
        watchdog, "find_stacks", lambda run, beats, clock: [RankStack(b, clock() - b.time_s) for b in beats]
    )
    write_status(tmp_path, "stopped", 5, 75)  # of an earlier start
    looks = Watchdog(tmp_path, Deadlines(5.0), lambda *_: None, lambda: clock[0])

    def at(now_s):
        while clock[0] < now_s:
            clock[0] += 1
            if (found := looks.look()) is not None:
                return found
        return None

    assert at(4000) is None, "rank 0 writes its report, or copies the last checkpoint"
    write_status(tmp_path, "finished", 9, 0)
    assert at(4001) is None
    del beats[1]  # it leaves in time
    clock[0] += 3600  # the launcher itself is stopped
    assert at(7601 + LEAVE_S) is None
    found = at(7700 + LEAVE_S)
    assert (found.cause, found.ranks, found.step, found.phase, found.waited_s) == (
        *("lingers", [0, 2], 9, "end", LEAVE_S + 1),
    )
    assert found.sentence == "ranks 0, 2 do not exit, 301 s after the end of the run: killed, at no answer"
    assert "restart" not in found.fields()


def test_a_launcher_that_was_stopped_itself_accuses_nobody(tmp_path, monkeypatch):
    """Ctrl-Z for an hour, which stops the ranks too; then nothing stalls, and no phase has taken an hour."""
    clock, beats = [0.0], [beat(0, 1, "step", 0.0)]
    monkeypatch.setattr(watchdog, "read_beats", lambda run: list(beats))
    monkeypatch.setattr(LastBeat, "is_alive", property(lambda self: True))
    monkeypatch.setattr(
        watchdog, "find_stacks", lambda run, beats, clock: [RankStack(b, clock() - b.time_s) for b in beats]
    )
    deadlines = Deadlines(5.0)
    looks = Watchdog(tmp_path, deadlines, lambda *_: None, lambda: clock[0])
    for now_s, begun in (
        (0.5, beat(0, 1, "step", 0.0)),
        (1.0, beat(0, 1, "record", 1.0)),
        (2.0, beat(0, 2, "step", 1.5)),
    ):
        clock[0], beats[:] = now_s, [begun]
        assert looks.look() is None
    clock[0] = 3600.0
    assert deadlines.of("step") == 10 and looks.look() is None
    clock[0], beats[:] = 3601.0, [beat(0, 2, "record", 3600.5)]
    assert looks.look() is None and deadlines.of("step") == 10, "0.5 s since it could go on"
    clock[0] = 3606.0
    assert looks.look().phase == "record", "from there on as ever"


def test_the_ranks_of_other_hosts_are_blamed_and_asked_for(tmp_path, monkeypatch):
    """The rank of this host waits in step 3 for that of another host, which has not begun it."""
    there, asked, given = [stack(1, 3, "data")], [False], []
    monkeypatch.setattr(watchdog, "read_beats", lambda run: [beat(0, 3, "step", 5.0)])
    monkeypatch.setattr(LastBeat, "is_alive", property(lambda self: True))
    monkeypatch.setattr(watchdog, "find_stacks", lambda run, beats, clock: [RankStack(b, 1.0) for b in beats])

    class Others:
        def is_asked(self):
            return asked[0]

        def exchange(self, own):
            given.append([one.beat.rank for one in own])
            return [*own, replace(there[0], host="b")]

    looks = Watchdog(tmp_path, Deadlines(5.0), lambda *_: None, lambda: 6.0, Others())
    assert looks.look() is None and not given, "nobody is late"
    asked[0] = True
    found = looks.look()
    assert given == [[0]] and (found.ranks, found.phase, found.waited_s) == ([1], "data", 1.0)
    assert found.sentence == "rank 1 on b stalls in step 4, phase data: nothing for 1 s, at no answer"
