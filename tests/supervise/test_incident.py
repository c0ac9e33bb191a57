"""What is said about a rank that died or stalled, and what is written down."""

import json

from windlass.supervise.heartbeat import LastBeat
from windlass.supervise.incident import Incident
from windlass.supervise.places import Place

STALLED = Place(LastBeat(7, 1, 35, 64, 0.0, "data"), 61.0, ("torch/a.py:1 f", "windlass/data/b.py:2 g"))
WAITING = Place(LastBeat(6, 0, 35, 64, 0.0, "step"), 60.0, ("torch/d.py:3 all_reduce",))


def test_a_sentence_says_who_where_and_why():
    died = Incident("died", [1], 35, "step", exit_code=-9)
    assert died.sentence == "rank 1 failed first, with signal SIGKILL in step 36, phase step"
    assert Incident("died", [0], exit_code=7).sentence == "rank 0 failed first, with exit code 7"
    stalled = Incident("stalled", [1], 35, "data", waited_s=61.2, places=[WAITING, STALLED])
    assert stalled.sentence == (
        "rank 1 stalls in step 36, phase data: nothing for 61 s, at torch/a.py:1 f <- windlass/data/b.py:2 g"
    )
    assert Incident("stalled", [0, 1], waited_s=60.0).sentence == "ranks 0, 1 stall in its start: nothing for 60 s"
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
        "what": stalled["what"],
    }
    assert stalled["what"].startswith("rank 1 stalls") and place["at"] == STALLED.line
    assert (place["rank"], place["pid"], place["frames"], place["collective"]) == (1, 7, STALLED.frames, None)
    assert Incident("died", [0], exit_code=7).fields().keys() == {"cause", "ranks", "exit_code", "places", "what"}
