"""The message about a rank that died or stalled, and what is written down."""

import json

from windlass.supervise.heartbeat import LastBeat
from windlass.supervise.incident import Incident
from windlass.supervise.rank_stacks import RankStack
from windlass.supervise.resident import HostMemory

STALLED = RankStack(LastBeat(7, 1, 35, 64, 0.0, "data"), 61.0, ("torch/a.py:1 f", "windlass/data/b.py:2 g"))
WAITING = RankStack(LastBeat(6, 0, 35, 64, 0.0, "step"), 60.0, ("torch/d.py:3 all_reduce",))


def test_a_sentence_says_who_where_and_why():
    died = Incident("died", [1], 35, "step", exit_code=-9)
    assert died.sentence == "rank 1 failed first, with signal SIGKILL in step 36, phase step"
    assert [Incident("died", [1], 35, phase).number for phase in ("data", "step", "record", "checkpoint")] == [
        36,
        36,
        35,
        35,
    ]
    assert Incident("died", [0], exit_code=7).sentence == "rank 0 failed first, with exit code 7"
    lost = Incident(
        "died", [0], exit_code=-6, driver_faults=["Xid 79 at 0000:03:00 (the GPU is gone from the PCIe bus)"]
    )
    assert lost.sentence.endswith("with signal SIGABRT; Xid 79 at 0000:03:00 (the GPU is gone from the PCIe bus)")
    assert lost.fields()["driver_faults"] == list(lost.driver_faults)
    stalled = Incident("stalled", [1], 35, "data", waited_s=61.2, stacks=[WAITING, STALLED])
    assert stalled.sentence == (
        "rank 1 stalls in step 36, phase data: nothing for 61 s, at torch/a.py:1 f <- windlass/data/b.py:2 g"
    )
    assert Incident("stalled", [0, 1], waited_s=60.0).sentence == "ranks 0, 1 stall: nothing for 60 s"
    assert [line.split(":")[0] for line in stalled.details()] == [
        "rank 0",
        "  at torch/d.py",
        "rank 1",
        "  at torch/a.py",
    ]


def test_its_fields_are_those_of_a_line_of_events():
    stalled = Incident("stalled", [1], 35, "data", waited_s=61.2, stacks=[STALLED]).fields()
    stack = stalled.pop("stacks")[0]
    assert json.loads(json.dumps(stalled)) == {
        "cause": "stalled",
        "ranks": [1],
        "step": 35,
        "phase": "data",
        "waited_s": 61.2,
        "is_out_of_memory": False,
        "what": stalled["what"],
    }
    assert stalled["what"].startswith("rank 1 stalls") and stack["at"] == STALLED.line
    assert (stack["rank"], stack["pid"], stack["frames"], stack["collective"]) == (1, 7, STALLED.frames, None)
    assert Incident("died", [0], exit_code=7).fields().keys() == {
        *("cause", "ranks", "exit_code", "is_out_of_memory", "stacks", "what")
    }


def test_a_kill_for_want_of_memory_names_who_held_what():
    held = [HostMemory(0, 3 << 30, 1 << 20, 0, 4 << 30), HostMemory(1, 5 << 30, 1 << 20, 1 << 10, 6 << 30)]
    died = Incident("died", [1], 35, "step", exit_code=-9, is_out_of_memory=True, held=held)
    assert died.sentence.startswith(
        "rank 1 failed first, with signal SIGKILL in step 36, phase step; the kernel has killed a process"
    )
    assert (
        "rank 1 5.0 GiB (5.0 GiB of its own, 1.0 MiB shared, 1.0 KiB of files; 6.0 GiB at most), rank 0"
        in died.sentence
    )
    assert died.sentence.endswith("a rank less on this host frees about 5.0 GiB")
    assert json.loads(json.dumps(died.fields()))["held"][0] == {
        "rank": 0, "own": 3 << 30, "shared": 1 << 20, "files": 0, "peak": 4 << 30
    }  # fmt: skip


def test_a_rank_whose_exit_nobody_saw_died():
    assert Incident("died", [3], 35, "step").sentence == "rank 3 died in step 36, phase step"
    assert Incident("died", [1, 3], 35, "step", driver_faults=["Xid 79"]).sentence == (
        "ranks 1, 3 died in step 36, phase step; Xid 79"
    )
