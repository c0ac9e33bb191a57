"""TensorBoard's own reader finds in the event files what events.jsonl has."""

import pytest

from tests import tiny
from windlass.report.sinks.sink import SentRun
from windlass.training.loop import train

pytest.importorskip("tensorboard")


def read(directory):
    """name -> [(step, value)], by TensorBoard's reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    found.Reload()
    return {name: [(one.step, one.value) for one in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_numbers_have_their_step_and_their_time(tmp_path):
    from windlass.report.sinks.to_tensorboard import TensorBoard

    sink = TensorBoard(SentRun(tmp_path, "0" * 16, {"run": {"steps": 3}}, "p"))
    sink.numbers(3, 1.7e9, {"train/loss": 2.5, "train/tokens": 8.0})
    sink.flush()
    assert read(tmp_path / "tensorboard") == {"train/loss": [(3, 2.5)], "train/tokens": [(3, 8.0)]}
    sink.close()


def test_a_run_and_its_resume_are_one_curve(tmp_path):
    for steps in (3, 6):
        train(tiny.recipe(tmp_path, run={"steps": steps}, report={"every_steps": 1, "sinks": ["tensorboard"]}))
    found, logged = read(tmp_path / "run" / "tensorboard"), tiny.losses(tmp_path / "run")
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [value for _, value in found["train/loss"]] == pytest.approx([loss for loss, _ in logged.values()], rel=1e-6)
    events = [line for line in tiny.lines(tmp_path / "run") if line["kind"] == "validation"]
    assert [step for step, _ in found["validation/loss"]] == sorted({line["step"] for line in events})
