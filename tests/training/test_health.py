"""Skipped steps are counted without a read, reported when a line is due, and end a run of nothing else; so is standstill."""

import json

import pytest
import torch

from tests import tiny
from tests.parallel.tiny import Operators
from windlass.errors import Diverged
from windlass.proof.pool import RankFailed
from windlass.training.health import Health, Spike, open_health
from windlass.training.start.drift import newest_trainer_state

NAN = float("nan")


def health(max_skips=3, step=10, **more):
    logged = []
    return Health(max_skips, step, lambda at, what: logged.append((at, what)), "lower something", **more), logged


def give(one, norms, loss=2.0):
    for number, norm in enumerate(norms, 1):
        one.add(torch.tensor(loss), torch.tensor(norm), 8 * number)


def test_skips_are_counted_since_the_last_look_and_read_only_then():
    one, logged = health()
    with Operators() as mode:
        give(one, [1.0, NAN, 2.0, float("inf")])
    assert mode.calls["_local_scalar_dense"] == 0 and mode.calls["stack"] == 0
    assert one.look() == 2
    assert logged == [(14, "the gradient norm is not finite: 2 of 4 updates were skipped")]
    give(one, [1.0])
    assert one.look() == 0 and len(logged) == 1


def test_skips_that_fp16_expects_are_counted_and_no_incident():
    one, logged = health(skips_are_normal=True)
    give(one, [NAN])
    assert one.look() == 1 and logged == []


def test_a_norm_far_above_the_usual_is_found_once_with_its_step_and_the_median():
    one, _ = health(step=0)
    give(one, [5.0] + [1.0] * 5 + [3.0] * 5 + [NAN, 301.0, 2.0])
    one.look()
    (spike,) = one.spikes()
    assert (spike.step, spike.norm, spike.median, spike.count, spike.end) == (13, 301.0, 3.0, 11, 13 * 8), (
        "the one that is not finite counts not"
    )
    assert one.spikes() == []
    give(one, [300.0] * 3 + [1e6])
    one.look()
    assert [found.norm for found in one.spikes()] == [1e6], "100 times is not more than 100 times"


def test_a_run_that_goes_on_knows_the_norms_before(base, ranks):
    whole, _ = health(step=0)
    give(whole, [NAN, *[2.0] * 7, *[1.0] * 99])
    whole.look()
    give(whole, [3.0, NAN])
    assert whole.recent() == [1.0] * 99 + [3.0], "those not looked at too, and 100"
    one = Health(20, 4, lambda *_: None, "", recent=[2.0] * 9 + [4.0])
    give(one, [250.0])
    one.look()
    assert [(found.step, found.median, found.count) for found in one.spikes()] == [(5, 2.0, 10)]
    for steps in (4, 12):
        config = tiny.recipe(base, "norms", run={"steps": steps}, report={"every_steps": 3})
        ranks.run(1, tiny.train, config)
        norms = [line["gradient_norm"] for line in tiny.lines(config.run.directory) if line["kind"] == "step"]
        kept = newest_trainer_state(config.run.directory)["norms"]
        assert len(kept) == steps and set(norms) <= set(kept)


def test_the_incident_of_a_spike_names_its_samples_the_first_of_many_in_its_sentence():
    spike = Spike(step=13, norm=400.0, median=2.0, count=11, end=104)
    ids = [f"0/{row}" for row in range(20)]
    fields = spike.fields(20, ids)
    assert (fields["positions"], fields["samples"]) == ([84, 104], ids)
    said = "the gradient norm 400 is 200 times the median 2 of the 11 steps before. Its batch: samples 84 to 104 of the stream"
    assert fields["what"] == (
        f"{said}, shard/row {' '.join(ids[:16])} ...; `windlass data inspect RECIPE --sample 0/0` shows the first"
    )
    assert " ..." not in spike.fields(16, ids[:16])["what"]
    assert spike.fields(20, [])["what"] == said


def test_the_median_is_of_the_last_hundred_steps_and_needs_ten():
    one, _ = health(step=0)
    give(one, [1.0] * 9 + [1e3])
    one.look()
    assert one.spikes() == [], "nine are too few"
    give(one, [1e-3] * 101 + [0.5])
    one.look()
    assert [(found.step, found.median, found.count) for found in one.spikes()] == [(112, pytest.approx(1e-3), 100)]
    one, _ = health(step=0)
    give(one, [0.0] * 20 + [1.0])
    one.look()
    assert one.spikes() == [], "where nothing was learned before, nothing is known"


def test_a_run_that_recovers_goes_on_and_a_row_goes_over_looks():
    one, _ = health(max_skips=3)
    for norms in ([NAN, NAN], [1.0, NAN, NAN]):
        give(one, norms)
        one.look()
        one.end_if_diverged()
    give(one, [NAN])
    one.look()
    with pytest.raises(Diverged) as caught:
        one.end_if_diverged()
    assert "steps 14 to 16: 3 updates in a row were skipped" in caught.value.given
    assert "the last finite ones: loss 2.0000, norm 1 at step 13" in caught.value.given


def test_the_error_says_which_was_not_finite_and_what_to_change():
    one, logged = health(max_skips=1)
    give(one, [NAN])
    one.look()
    with pytest.raises(Diverged) as caught:
        one.end_if_diverged()
    error = caught.value
    assert "the loss is 2.0000 and the gradient norm nan; no step since this start was finite" in error.given
    assert "optim.max_skips=1" in error.rule and error.change == "lower something"
    assert logged[-1] == (11, error.given), "events.jsonl has it too"
    give(one, [NAN], loss=NAN)
    one.look()
    with pytest.raises(Diverged, match="the loss is nan;"):
        one.end_if_diverged()


class Stuck:
    def __init__(self, *shares):
        self._shares = list(shares)

    def lost_shares(self):
        return self._shares.pop(0)


def test_standstill_is_reported_once_per_tensor_with_share_and_cure():
    one, logged = health()
    many = {f"layer.{n}": 0.6 + n / 100 for n in range(5)}
    optimizer = Stuck({}, {"a": 0.5, "b": 0.84}, {"a": 0.51, "b": 0.9}, many)
    for _ in range(4):
        one.look_for_stagnation(optimizer)
    assert [step for step, _ in logged] == [10, 10, 10]
    assert "in most of b (84%): " in logged[0][1] and "in most of a (51%): " in logged[1][1]
    assert "layer.4 (64%), layer.3 (63%), layer.2 (62%) and 2 more tensors" in logged[2][1]
    for cure in ("precision.rounding=stochastic", "precision.policy=bf16", "optim.learning_rate"):
        assert cure in logged[0][1]


# ---- whole runs


def lines(config, kind):
    path = config.run.directory / "events.jsonl"
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == kind]


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
def test_a_diverging_run_ends_on_all_ranks_and_its_last_checkpoint_is_from_before(base, ranks, kernel):
    optim = {"learning_rate": 1e30, "schedule": "constant", "warmup_steps": 0, "max_skips": 5, "kernel": kernel}
    config = tiny.recipe(
        base,
        f"diverges-{kernel}",
        optim=optim,
        report={"every_steps": 4},
        evaluate={"every_steps": 2},
        checkpoint={"every_steps": 2, "keep_best": 1, "keep_last": 1, "keep_steps": [0]},
    )
    with pytest.raises(RankFailed, match="Diverged") as caught:
        ranks.run(2, tiny.train, config)
    assert "updates in a row were skipped; the loss is" in str(caught.value)
    what = [line["what"] for line in lines(config, "incident")]
    assert any("updates in a row were skipped" in one for one in what), what
    skipped = {line["step"]: line["skipped"] for line in lines(config, "step")}
    assert sum(skipped.values()) >= 5 and skipped[1] == 0, skipped
    from windlass.checkpoint.keep import list_checkpoints

    rows = list_checkpoints(config.run.directory, verified=True)
    assert rows and all(row.verified for row in rows)
    assert all(row.metric is None or row.metric < 1e6 for row in rows), "what is not finite is never the best"


def stagnation(config):
    return [line["what"] for line in lines(config, "incident") if "round to nothing" in line["what"]]


def test_the_alarm_at_a_rate_of_1e_5_in_pure_bf16(base, ranks):
    """As in the field: 84 % of the weights unchanged at lr 1e-5."""
    rate = {"learning_rate": 1e-5, "schedule": "constant", "warmup_steps": 0}
    found = {}
    for name, precision in {
        "nearest": {"policy": "bf16-pure", "rounding": "nearest"},
        "stochastic": {"policy": "bf16-pure"},
        "master": {"policy": "bf16"},
    }.items():
        run, never = {"steps": 4, "micro_batch": 8}, {"every_steps": 100}
        config = tiny.recipe(
            base, name, run=run, precision=precision, optim=rate, report={"every_steps": 2}, evaluate=never
        )
        ranks.run(1, tiny.train, config)
        found[name] = stagnation(config)
    assert found["stochastic"] == found["master"] == []
    assert "%" in found["nearest"][0] and "precision.rounding=stochastic" in found["nearest"][0]


class Events(list):
    def event(self, kind, step, **fields):
        self.append((kind, step, fields["what"]))


@pytest.mark.parametrize(("policy", "is_scaled"), [("fp16", True), ("bf16", False)])
def test_an_overflow_of_fp16_is_no_incident_and_its_cure_is_bf16(tmp_path, policy, is_scaled):
    config, events = tiny.recipe(tmp_path, precision={"policy": policy}, optim={"max_skips": 1}), Events()
    one = open_health(config, events, 3)
    one.add(torch.tensor(2.0), torch.tensor(float("nan")), 8)
    assert one.look() == 1
    skipped = [("incident", 4, "the gradient norm is not finite: the update was skipped")]
    assert events == ([] if is_scaled else skipped)
    with pytest.raises(Diverged) as caught:
        one.end_if_diverged()
    assert ("use precision.policy=bf16" in caught.value.change) == is_scaled
    assert events[-1] == ("incident", 4, caught.value.given)
