"""What the flight recorder holds of this rank; of one that has sent nothing, too (torch's dump has no entries then)."""

import json
import subprocess
import sys

import torch
import torch.distributed as dist

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
    assert first[1:] == [4, "gloo:broadcast", False] and second[1:3] == [3, "gloo:all_reduce"]
    assert sizes == [[[2]]] * 4


def test_a_rank_that_has_sent_nothing_has_no_last_collective():
    script = "from windlass.flight_recorder import entries, last_collectives; print(entries(), last_collectives())"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[] []\n"
