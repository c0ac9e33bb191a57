"""What is said about a rank that died or stalled, and what is written down."""

import json

from windlass.supervise.heartbeat import LastBeat
from windlass.supervise.incident import Incident, oom_kills
from windlass.supervise.places import Place

STALLED = Place(LastBeat(7, 1, 35, 64, 0.0, "data"), 61.0, ("torch/a.py:1 f", "windlass/data/b.py:2 g"))
WAITING = Place(LastBeat(6, 0, 35, 64, 0.0, "step"), 60.0, ("torch/d.py:3 all_reduce",))


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
    stalled = Incident("stalled", [1], 35, "data", waited_s=61.2, places=[WAITING, STALLED])
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
    stalled = Incident("stalled", [1], 35, "data", waited_s=61.2, places=[STALLED]).fields()
    place = stalled.pop("places")[0]
    assert json.loads(json.dumps(stalled)) == {
        "cause": "stalled",
        "ranks": [1],
        "step": 35,
        "phase": "data",
        "waited_s": 61.2,
        "is_out_of_memory": False,
        "what": stalled["what"],
    }
    assert stalled["what"].startswith("rank 1 stalls") and place["at"] == STALLED.line
    assert (place["rank"], place["pid"], place["frames"], place["collective"]) == (1, 7, STALLED.frames, None)
    assert Incident("died", [0], exit_code=7).fields().keys() == {
        *("cause", "ranks", "exit_code", "is_out_of_memory", "places", "what")
    }


def test_a_kill_for_want_of_memory_is_counted_where_the_kernel_counts_it(tmp_path):
    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert oom_kills(tmp_path) == 0
    write("proc/vmstat", "nr_free_pages 5\noom_kill 2\noom_kill_other 9\n")
    assert oom_kills(tmp_path) == 2
    write("proc/self/cgroup", "1:cpu:/old\n0::/slurm/job_7\n")
    write("sys/fs/cgroup/memory.events", "oom 4\noom_kill 3\n")
    assert oom_kills(tmp_path) == 3
    write("sys/fs/cgroup/slurm/job_7/memory.events", "low 0\noom 9\noom_kill 1\noom_group_kill 0\n")
    assert oom_kills(tmp_path) == 1
    said = Incident("died", [1], 35, "step", exit_code=-9, is_out_of_memory=True).sentence
    assert said.startswith(
        "rank 1 failed first, with signal SIGKILL in step 36, phase step; the kernel has killed a process"
    )
