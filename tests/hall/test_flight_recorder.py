"""What the flight recorder holds of this rank; of one that has sent nothing, too (torch's dump has no entries then)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from windlass import flight_recorder
from windlass.flight_recorder import entries, last_collectives


def collectives_of_a_rank():
    """Three all-reduces and a broadcast that rank 1 has not come to yet -> the last of the group."""
    before = max((entry["record_id"] for entry in entries()), default=-1)  # groups of earlier cases have had this name
    group = dist.new_group([0, 1])
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=group)
    if dist.get_rank() == 0:
        work = dist.broadcast(torch.ones(2), 1, group=group, async_op=True)
    last = json.loads(last_collectives())
    if dist.get_rank() == 1:
        dist.broadcast(torch.ones(2), 1, group=group)
    else:
        work.wait()
    own = [entry for entry in entries() if entry["record_id"] > before]
    sizes = [entry["input_sizes"] for entry in own if entry["process_group"][0] == group.group_name]
    return next(one for one in last if one[0] == group.group_name), sizes


def test_the_last_collective_of_every_group_is_known_by_number_and_every_one_by_size(ranks):
    (first, sizes), (second, _) = ranks.run(2, collectives_of_a_rank)
    assert first[1:] == [4, "gloo:broadcast", False, False] and second[1:3] == [3, "gloo:all_reduce"]
    assert sizes == [[[2]]] * 4


RECORDED = sorted((Path(__file__).parents[1] / "recordings").glob("flight-recorder-torch-*.json"))


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_what_the_oldest_and_the_locked_torch_have_written_is_read(file, monkeypatch):
    """Each file says by which calls it was made. Entries of two ranks that are behind each other by one broadcast."""
    recorded = json.loads(file.read_text())
    assert file.stem.endswith(recorded["origin"]["torch"].partition("+")[0])
    monkeypatch.setattr(
        torch._C._distributed_c10d, "_dump_fr_trace_json", lambda: json.dumps(recorded["dump"]), raising=False
    )
    assert json.loads(last_collectives()) == [[recorded["group"], 4, "gloo:broadcast", False, False]]
    assert [entry["input_sizes"] for entry in entries()] == [[[2]]] * 4
    assert {(*entry["input_dtypes"], *entry["output_sizes"][0]) for entry in entries()} == {("Float", 2)}


def test_the_recordings_are_of_the_ends_of_the_range():
    assert [file.stem.rpartition("-")[2] for file in RECORDED] == ["2.11.0", "2.13.0"]


def test_sends_do_not_hide_the_last_collective_of_their_group_nor_are_they_counted_with_it(monkeypatch):
    """Planted entries, with the fields that torch gives them: gloo's recorder leaves sends out, NCCL's has them."""
    entry = {"process_group": ["pp", "undefined"], "retired": True, "collective_seq_id": 3, "p2p_seq_id": 0}
    collective = {**entry, "is_p2p": False, "profiling_name": "nccl:all_reduce"}
    sends = [
        {**entry, "is_p2p": True, "p2p_seq_id": number, "profiling_name": "nccl:send 0->1", "retired": number < 8}
        for number in (7, 8)
    ]
    monkeypatch.setattr(flight_recorder, "entries", lambda: [collective, *sends])
    assert json.loads(last_collectives()) == [
        ["pp", 8, "nccl:send 0->1", False, True],
        ["pp", 3, "nccl:all_reduce", True, False],
    ]


def test_a_rank_that_has_sent_nothing_has_no_last_collective():
    script = "from windlass.flight_recorder import entries, last_collectives; print(entries(), last_collectives())"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[] []\n"
