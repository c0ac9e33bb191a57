"""The Trainer's row: the same job as the headline's, and a trial of it."""

import pytest
import torch
from headline import ROWS, setups_of
from peer import make_cells


def test_the_job_is_the_headlines():
    (ours,) = {
        (one.preset, one.sequence_length, one.tokens_per_step)
        for one in setups_of(next(row for row in ROWS if row.preset == "smollm3-3b"), tiny=False)
    }
    for cell in make_cells(tiny=False):
        for one in cell.settings["tries"]:
            assert (one["length"], one["length"] * one["sequences"]) == ours[1:]
            assert one["sequences"] % one["micro_batch"] == 0


@pytest.mark.filterwarnings("ignore")  # of transformers and what it imports
def test_a_trial_counts_the_steps_after_the_first_two():
    cells = {cell.name: cell for cell in make_cells(tiny=True)}
    found = cells["Trainer"].measure(torch.device("cpu"))
    assert found["steps"] == 4 and found["tokens_per_s"] > 0 and found["mfu_causal"] is None
    assert found["try"]["micro_batch"] == 2 and not found["try"]["checkpointing"] and found["before"] == []
