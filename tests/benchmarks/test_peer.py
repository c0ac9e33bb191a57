"""Other loops' rows: the same job as the headline's, and a trial of each."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from cells import Absent
from headline import ROWS, setups_of
from peer import make_cells

from windlass.model.flops import count_parameters

ROOT = Path(__file__).parents[2]
LITGPT = ROOT / ".venv-litgpt" / "bin" / "python"


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


def test_without_litgpt_its_row_is_absent():
    cells = {cell.name: cell for cell in make_cells(tiny=True)}
    with pytest.raises(Absent, match="no lightning: sh scripts/litgpt_environment"):
        cells["LitGPT"].measure(torch.device("cpu"))


COUNT = """
import torch
from litgpt.model import GPT
from peer import litgpt_config
with torch.device("meta"):
    model = GPT(litgpt_config(8192, tiny=False))
model.transformer.wte.weight = model.lm_head.weight
print(sum(parameter.numel() for parameter in model.parameters()))
"""


@pytest.mark.long
@pytest.mark.skipif(not LITGPT.exists(), reason="no .venv-litgpt: sh scripts/litgpt_environment.sh makes it")
def test_litgpt_trains_as_many_parameters_and_its_trial_counts_the_same_steps(tmp_path):
    folder = ROOT / "benchmarks" / "gpu"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{folder}"}
    counted = subprocess.run([LITGPT, "-c", COUNT], env=environment, capture_output=True, text=True, check=True)
    (ours,) = {
        one.architecture() for one in setups_of(next(row for row in ROWS if row.preset == "smollm3-3b"), tiny=False)
    }
    assert int(counted.stdout.split()[-1]) == count_parameters(ours)
    out = tmp_path / "trial.json"
    options = ("--device", "cpu", "--tiny", "--only", "LitGPT", "--out", out)
    subprocess.run([LITGPT, folder / "peer.py", *options], env=environment, capture_output=True, check=True)
    (cell,) = json.loads(out.read_text())["cells"]
    assert (cell["status"], cell["result"]["steps"], cell["result"]["try"]["micro_batch"]) == ("measured", 4, 2)
