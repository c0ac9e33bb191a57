"""A run's events and settings as they are read: windows behind the warm-up, of the newest session; and what is refused."""

import json

import pytest
import yaml

from tests.advice.test_facts import FACTS
from windlass.advice.observed import observe
from windlass.errors import UserError

SETTINGS = {
    "run": {"micro_batch": 2, "tokens_per_step": 128},
    "data": {"sequence_length": 16},
    "parallel": {"zero": 0},
    "report": {"every_steps": 10},
}


def step(number, step_s, warm_up=False, **more):
    return {"kind": "step", "time": 1.0, "step": number, "step_s": step_s, "warm_up": warm_up, "data_wait_s": 0.0, "log_s": 0.1,
            "targets": 64, "memory_bytes": 5, "ledger": {"warm_up": 1.0, "training": float(number)}, **more}  # fmt: skip


def start(step=0, kind="start", **more):
    return {"kind": kind, "time": 0.0, "step": step, "facts": FACTS.to_event(), **more}


def written(directory, *events, settings=SETTINGS):
    directory.mkdir(exist_ok=True)
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if settings is not None:
        (directory / "resolved.yaml").write_text(yaml.safe_dump(settings))
    return directory


def test_means_are_weighed_by_the_steps_of_each_window(tmp_path):
    counts = {"kind": "counts", "time": 0.5, "step": 2, "operators": 300, "reads": 1}
    events = start(), step(1, 9.0, warm_up=True), counts, step(10, 1.0, data_wait_s=0.5), step(11, 2.0, log_s=None)
    run = observe(written(tmp_path, *events))
    assert (run.steps, run.last_step, run.step_s, run.wait_s, run.log_s) == (10, 11, 1.1, 0.45, 0.01)
    assert (run.operators, run.reads, run.tokens_per_micro_batch) == (300, 1, 32)
    assert (run.tokens_per_s, run.mfu, run.ledger["training"]) == (pytest.approx(128 / 1.1), None, 11.0)


def test_a_resumed_run_is_looked_at_since_then_and_void_lines_do_not_count(tmp_path):
    events = (
        start(),
        step(1, 9.0, True),
        step(8, 3.0),
        step(20, 5.0),
        start(10, "resume"),
        step(11, 9.0, True),
        step(20, 1.0),
    )
    run = observe(written(tmp_path, *events))
    assert (run.step_s, run.steps, run.reads, run.operators) == (1.0, 9, None, None)


def test_mfu_is_of_all_ranks(tmp_path):
    facts = {**FACTS.to_event(), "peak_flops": 1e6}
    run = observe(written(tmp_path, start(facts=facts), step(1, 9.0, True), step(2, 1.0)))
    assert run.mfu == pytest.approx(128 * 6000 / 4e6)


@pytest.mark.parametrize(
    ("events", "settings", "words"),
    [
        ([], SETTINGS, "holds no start with its facts"),
        ([start(facts=None), step(9, 1.0)], SETTINGS, "this version started or resumed"),
        ([start(), step(1, 9.0, warm_up=True)], SETTINGS, "has no step after its warm-up"),
        ([start(), step(9, 1.0)], None, "is missing or is not a recipe"),
        ([start(), step(9, 1.0)], {"run": {}}, "is missing or is not a recipe"),
    ],
)
def test_what_cannot_be_advised_on_is_refused(tmp_path, events, settings, words):
    with pytest.raises(UserError, match=words):
        observe(written(tmp_path, *events, settings=settings))


def test_a_directory_without_events_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"events\.jsonl does not exist"):
        observe(tmp_path)
