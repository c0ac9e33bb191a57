"""What a run prints and records. (One console for all sentences: tests/training/test_assemble.py.)"""

import pytest
import torch

from tests import tiny
from windlass.errors import Diverged
from windlass.training.recording import open_health


class Events(list):
    def event(self, kind, step, **fields):
        self.append((kind, step, fields["what"]))


@pytest.mark.parametrize(("policy", "is_scaled"), [("fp16", True), ("bf16", False)])
def test_an_overflow_of_fp16_is_no_incident_and_its_cure_is_bf16(tmp_path, policy, is_scaled):
    config, events = tiny.recipe(tmp_path, precision={"policy": policy}, optim={"max_skips": 1}), Events()
    health = open_health(config, events, 3)
    health.add(torch.tensor(2.0), torch.tensor(float("nan")))
    assert health.look() == 1
    skipped = [("incident", 4, "the gradient norm is not finite: the update was skipped")]
    assert events == ([] if is_scaled else skipped)
    with pytest.raises(Diverged) as caught:
        health.end_if_diverged()
    assert ("use precision.policy=bf16" in caught.value.change) == is_scaled
    assert events[-1] == ("incident", 4, caught.value.given)
