"""torchelastic's failures, whose seconds say little. Starts themselves: test_nodes_in_namespaces."""

import pytest

from windlass.launch.agent import SHUTDOWN_S, _first
from windlass.launch.elastic import failures_in_order
from windlass.launch.spawn import Exit


@pytest.mark.parametrize(
    ("codes", "rank"),
    [
        ({0: (99, 1), 1: (100, -9)}, 1),  # of a rank that records nothing only the time of the look is known
        ({0: (99, 1), 1: (99 + SHUTDOWN_S, -9)}, 0),  # torchelastic has lost its patience
        ({0: (99, 2), 1: (98, 1)}, 1),
        ({0: (99, 1), 1: (100, -6)}, 0),  # NCCL aborts a rank whose peer is gone
        ({0: (99, -15), 1: (100, -9)}, 1),  # it ends the others by SIGTERM
    ],
)
def test_a_killed_rank_counts_among_the_first(codes, rank):
    failures = failures_in_order({rank: Exit(code, time_s) for rank, (time_s, code) in codes.items()})
    assert _first(failures) == (rank, codes[rank][1])
