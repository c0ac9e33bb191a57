"""What the loop costs, counted on every run of the tests, so that benchmarks/overhead's limits cannot rot."""

import json
import sys
import threading
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.setenv("COUNTED_STEPS", "5")  # of the processes that count
    monkeypatch.syspath_prepend(str(BENCHMARKS))


class Model:
    training = True

    def forward(self):
        return torch.ones(2)


def run_steps(count, num_steps, step):
    """`step` after each forward, between forwards of an evaluation, which are no steps."""
    model, evaluated = Model(), Model()
    evaluated.training = False
    count.start()
    try:
        for _ in range(num_steps):
            evaluated.forward()
            step(model.forward())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return count.per_step()


@pytest.mark.parametrize(
    ("step", "calls", "operations", "reads"),
    [
        # 2 forwards, 2 torch.ones, 1 lambda; 2 operations: what a step of nothing costs here
        (lambda x: None, 5, 2, 0),
        (lambda x: x.add(1), 6, 3, 0),
        (lambda x: abs(-1), 6, 2, 0),
        (lambda x: x.sum().item(), 7, 4, 1),
        (lambda x: bool(x[0] > 0), 5, 5, 1),  # operators and making a bool are no calls
        (lambda x: x.tolist(), 6, 2, 1),
        (lambda x: torch.equal(x, x), 6, 3, 1),
    ],
)
def test_every_call_operation_and_read_is_counted_once(benchmarks, step, calls, operations, reads):
    from meters.counting import STEPS, WARM_UP, Count

    found = run_steps(Count(Model.forward.__code__), WARM_UP + 2 * STEPS + 1, step)
    assert (found["calls"], found["operations"], found["reads"]) == (calls, operations, reads)


def test_calls_of_other_threads_are_counted_apart(benchmarks):
    from meters.counting import STEPS, WARM_UP, Count

    def step(_x):
        thread = threading.Thread(target=abs, args=(-1,))
        thread.start()
        thread.join()

    found = run_steps(Count(Model.forward.__code__), WARM_UP + 2 * STEPS + 1, step)
    assert found["calls_in_other_threads"] > 0
    assert not any(name.startswith("C abs") for name in found["by_function"])


def test_too_few_steps_are_no_result(benchmarks):
    from meters.counting import Count

    with pytest.raises(AssertionError, match="7 steps"):
        run_steps(Count(Model.forward.__code__), 7, lambda x: None)


def test_each_limit_that_is_exceeded_is_named(benchmarks):
    from overhead import failures

    bare = {"calls": 5000.0, "operations": 3000.0, "reads": 0.0, "validation_loss": 4.0}
    assert failures({"bare": bare, "windlass": bare | {"calls": 5300.0, "operations": 3010.0}}) == []
    worse = bare | {"calls": 5300.5, "operations": 3011.0, "reads": 0.05, "validation_loss": 4.0001}
    calls, operations, reads, loss = failures({"bare": bare, "windlass": worse})
    assert "300.5 calls per step more" in calls and "limit is 300" in calls
    assert "11 operations" in operations and "limit is 10" in operations
    assert "0.05 reads" in reads and "limit is 0" in reads
    assert "windlass ends with validation loss 4.0001" in loss


def test_a_step_of_windlass_stays_under_the_limits_over_a_bare_loop(benchmarks):
    from overhead import count_all, failures

    found = count_all(("bare", "windlass"), num_layers=6)
    assert failures(found) == []
    assert found["bare"]["reads"] == 0


@pytest.mark.long
def test_so_does_one_of_bf16_by_fsdp2_on_two_ranks(benchmarks):
    from overhead import OVER_RANKS, count_all, failures

    found = count_all(OVER_RANKS, num_layers=2)
    bare, ours = OVER_RANKS
    assert failures(found, ours, bare) == []
    # no walk over a model's modules, and no call per gradient of the norm
    assert not any("named_modules" in name or "device_mesh" in name for name in added(found, ours, bare))


def added(found, ours, bare):
    from overhead import difference

    return [name for name, number in difference(found, ours, "by_function", bare).items() if number > 2]


def test_the_rows_that_are_kept_are_within_the_limits(benchmarks):
    from overhead import LAYERS_OVER_RANKS, LIMITS, OVER_RANKS_KEY, RESULTS

    kept = json.loads(RESULTS.read_text())
    for kind, limit in LIMITS.items():
        over = [kept[OVER_RANKS_KEY][str(layers)]["over_bare"][kind] for layers in LAYERS_OVER_RANKS]
        assert max(kept["rows"]["windlass"][f"{kind}_over_bare"], *over) <= limit, "python benchmarks/overhead.py"
