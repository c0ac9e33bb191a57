"""The loss scale: halves, doubles after enough good steps, and follows from the norm alone."""

import pytest
import torch

from windlass.precision import loss_scale as scaler
from windlass.precision.loss_scale import FIRST_SCALE, LossScale

GOOD, NAN, INF = torch.tensor(1.0), torch.tensor(float("nan")), torch.tensor(float("inf"))


def scales(norms):
    one = LossScale(torch.device("cpu"))
    found = []
    for norm in norms:
        one.adapt(norm)
        found.append((one.scale.item() / FIRST_SCALE, int(one.good_steps)))
    return found


def test_it_halves_with_every_step_that_is_not_finite():
    assert scales([INF, NAN, GOOD, INF]) == [(0.5, 0), (0.25, 0), (0.25, 1), (0.125, 0)]


def test_it_doubles_after_so_many_good_steps_in_a_row(monkeypatch):
    monkeypatch.setattr(scaler, "GROWTH_STEPS", 3)
    rows = scales([GOOD, GOOD, INF, GOOD, GOOD, GOOD, GOOD])
    assert rows == [(1, 1), (1, 2), (0.5, 0), (0.5, 1), (0.5, 2), (1, 0), (1, 1)]


def test_growth_takes_torchs_number_of_steps():
    assert scales([GOOD] * 2000)[-2:] == [(1, 1999), (2, 0)]


@pytest.mark.parametrize("scale", [1.0, 65536.0, 2.0**-20])
def test_unscaling_rounds_nothing_and_keeps_what_is_infinite(scale):
    one = LossScale(torch.device("cpu"))
    one.scale.fill_(scale)
    gradients = [
        torch.randn(50, generator=torch.Generator().manual_seed(1)),
        torch.tensor([float("inf"), float("nan")]),
    ]
    expected = gradients[0].clone()
    scaled = [gradient * scale for gradient in gradients]
    one.unscale(scaled)
    assert torch.equal(scaled[0], expected) and scaled[1][0].isinf() and scaled[1][1].isnan()
