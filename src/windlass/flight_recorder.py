"""What torch's flight recorder holds: the collectives that this rank has begun, and their sizes.

Its dump has no public name in torch 2.11 to 2.13; this file alone calls it. Where a torch has none, there are no entries.
"""

import json
from typing import Any

import torch


def entries() -> list[dict[str, Any]]:
    """The newest collectives of this rank, 2,000 unless TORCH_FR_BUFFER_SIZE says otherwise, the oldest first. Of each among
    others: `record_id` (counted on), `process_group` ([name, description]), `profiling_name` ("gloo:all_reduce"),
    `input_sizes`, `input_dtypes`, `output_sizes`, `collective_seq_id`, `p2p_seq_id`, `is_p2p`, `retired`."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    found: list[dict[str, Any]] = json.loads(dump()).get("entries", []) if dump is not None else []
    return found


def last_collectives() -> str:
    """The last collective of each process group that this rank has begun, and the last send or receive, the newest first: JSON,
    as windlass.supervise.rank_stacks reads it."""
    last: dict[tuple[str, bool], tuple[str, int, str, bool, bool]] = {}
    for entry in entries():
        group, is_p2p = entry["process_group"][0], bool(entry["is_p2p"])
        number = entry["p2p_seq_id" if is_p2p else "collective_seq_id"]
        last.pop((group, is_p2p), None)
        last[group, is_p2p] = (group, number, entry["profiling_name"], bool(entry["retired"]), is_p2p)
    return json.dumps(list(reversed(last.values())))
