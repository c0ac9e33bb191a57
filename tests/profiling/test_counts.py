"""Operators and reads of a step: which reads count, and what ends a count."""

import pytest
import torch

from windlass.profiling.counts import StepCounts


def counted(work):
    counts = StepCounts()
    try:
        work()
    finally:
        found = counts.stop()
    return found


@pytest.mark.parametrize(
    ("work", "reads"),
    [
        (lambda x: x.add(1), 0),
        (lambda x: x.sum().item(), 1),
        (lambda x: float(x[0]), 1),
        (lambda x: bool(x[0] > 0), 1),
        (lambda x: x.tolist(), 0),
        (lambda x: (x[0].item(), x[1].item()), 2),
    ],
)
def test_a_read_is_whatever_hands_a_number_to_python(work, reads):
    x = torch.ones(2)
    assert counted(lambda: work(x))["reads"] == reads


def test_what_the_optimizers_kernel_reads_on_the_host_does_not_count():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], fused=True)

    def step():
        parameter.grad = torch.ones(2)
        optimizer.step()

    step()
    assert counted(step)["reads"] == 0
    assert counted(lambda: (step(), parameter.detach().sum().item()))["reads"] == 1


def test_operators_are_counted_and_two_counts_at_a_time_are_refused():
    first = StepCounts()
    with pytest.raises(RuntimeError, match="in use"):
        StepCounts()
    torch.ones(2).sigmoid()
    assert first.stop()["operators"] >= 2
    assert counted(lambda: None) == {"operators": 0, "reads": 0}
