"""Packing, isolation and mixtures as a run meets them: the same on one rank and two, and reported before the first step."""

import math

import pytest

from tests import tiny
from windlass.commands.data_consumed import consumed
from windlass.commands.models.evaluate import evaluate
from windlass.data.prepare.prepare import open_prepared
from windlass.data.shards.mds import Reader
from windlass.data.stream.mixture import Mixture
from windlass.data.stream.mixture_shares import Shares, Stage
from windlass.errors import UserError
from windlass.training.parts.open_data import by_source


def derived(directory):
    return tiny.lines(directory)[0]["derived"]


def assert_close(one, two):
    assert one.keys() == two.keys() and len(one) == tiny.STEPS
    for step, (loss, norm) in one.items():
        assert math.isclose(loss, two[step][0], rel_tol=1e-5) and math.isclose(norm, two[step][1], rel_tol=1e-4)


def test_whole_isolated_documents_train_the_same_on_one_rank_and_two(base, ranks):
    data = {"packing": "best-fit", "isolate": True, "directory": str(base / "fitted")}
    found = []
    for world in (1, 2):
        config = tiny.recipe(base, f"fitted-{world}", data=data)
        ranks.run(world, tiny.train, config)
        found.append(tiny.losses(config.run.directory))
    assert_close(*found)
    logged = derived(config.run.directory)["packing"]
    assert logged.startswith("best-fit, ") and logged.endswith("% full; documents attend to themselves alone")
    together = tiny.recipe(base, "together", data={**data, "isolate": None})
    ranks.run(1, tiny.train, together)
    assert tiny.losses(together.run.directory)[1][0] != found[0][1][0], "isolation changes what is seen"


def test_a_mixture_gives_each_source_its_share_on_any_world(base, ranks):
    tiny.write_corpus(base / "more", documents=30)
    sources = [{"path": str(base / "corpus"), "weight": 1}, {"path": str(base / "more"), "weight": 3}]
    data = {"sources": sources, "directory": str(base / "mixed"), "shard_bytes": 4096}
    found, rows = [], []
    for world in (1, 2):
        config = tiny.recipe(base, f"mixed-{world}", data=data)
        results = ranks.run(world, tiny.train, config)
        found.append(tiny.losses(config.run.directory))
        rows.append([[row for result in results for row in result["rows"][step]] for step in range(tiny.STEPS)])
    assert rows[0] == rows[1]
    assert_close(*found)
    trained = [[one for one in tiny.lines(base / f"mixed-{world}") if one["kind"] == "step"] for world in (1, 2)]
    for one, two in zip(*trained, strict=True):
        assert set(one["source_losses"]) <= {f"{base}/corpus", f"{base}/more"} and one["source_losses"]
        assert one["source_losses"] == pytest.approx(two["source_losses"], abs=1e-5)
        low, high = min(one["source_losses"].values()), max(one["source_losses"].values())
        assert low - 1e-5 <= one["loss"] <= high + 1e-5
    rare = tiny.recipe(base, "mixed-rare", data=data, report={"every_steps": 3})
    ranks.run(1, tiny.train, rare)
    lines = [one for one in tiny.lines(rare.run.directory) if one["kind"] == "step"]
    assert [one["step"] for one in lines] == [1, 3, 6, 9, 10]
    assert all(one["source_losses"] == trained[0][one["step"] - 1]["source_losses"] for one in lines)
    scored = [[one for one in tiny.lines(base / f"mixed-{world}") if one["kind"] == "validation"] for world in (1, 2)]
    for one, two in zip(*scored, strict=True):
        assert list(one["source_losses"]) == [f"{base}/corpus", f"{base}/more"]
        assert one["source_losses"] == pytest.approx(two["source_losses"], abs=1e-5)
        low, high = sorted(one["source_losses"].values())
        assert low < one["loss"] < high, "the loss of all is their mean by targets"
    score = evaluate(base / "mixed-1", sequences=6)[0]
    assert score.source_losses == pytest.approx(scored[0][-1]["source_losses"], abs=1e-5)
    assert "; ".join(f"{name} {loss:.4f}" for name, loss in score.source_losses.items()) in score.line
    prepared = open_prepared(config.data, {})
    first, second = prepared.sets["train"].source_shards
    assert first > 1 and second >= 1 and first + second == len(prepared.shards("train").shards)
    logged = derived(config.run.directory)
    assert logged["source 1"].startswith(f"{base}/corpus: asked 25 %, gets 25 % (1 of 4 samples), ")
    assert logged["source 2"].startswith(f"{base}/more: asked 75 %, gets 75 % (3 of 4 samples), ")
    assert " epochs of " in logged["source 2"]


def test_a_mixture_has_no_epochs(base):
    sources = [{"path": "a", "weight": 1}, {"path": "b", "weight": 3}]
    with pytest.raises(UserError) as caught:
        tiny.recipe(base, data={"sources": sources}, run={"steps": None, "epochs": 2})
    assert caught.value.given == "run.epochs=2 with 2 sources in data.sources that are mixed"
    assert "set run.tokens or run.steps" in caught.value.change


def test_stages_change_the_shares_and_a_resume_with_others_keeps_each_source_where_it_was(base, ranks, tmp_path):
    """Step by step: 3 : 1 for three steps of eight samples, then b alone; from the checkpoint of step 6 on, 1 : 1."""
    tiny.write_corpus(base / "more", documents=30)
    sources = [{"path": str(base / "corpus"), "name": "a"}, {"path": str(base / "more"), "name": "b"}]
    data = {"sources": sources, "directory": str(base / "mixed"), "shard_bytes": 4096}  # as of the mixture by weights
    stages = [{"tokens": 384, "weights": {"a": 3, "b": 1}}, {"weights": {"b": 1}}]
    whole = tiny.recipe(base, "staged", data={**data, "stages": stages}, run={"steps": 6})
    (first,) = ranks.run(1, tiny.train, whole)
    logged = derived(whole.run.directory)
    assert logged["source 1"].startswith(
        "a: asked 75 %, gets 75 % (3 of 4 samples); from sample 24 asked 0 %, gets 0 %"
    )
    others = [*stages[:1], {"tokens": 384, "weights": {"b": 1}}, {"weights": {"a": 1, "b": 1}}]
    more = {"data": {**data, "stages": others}, "run": {"steps": 9}}
    refused = ranks.run(1, tiny.refusal, tiny.recipe(base, "staged", **more))[0]
    assert "data.stages: " in refused and "run.accept_drift=[data.stages]" in refused
    longer = tiny.recipe(base, "staged", data=more["data"], run={"steps": 9, "accept_drift": ["data.stages"]})
    halves = ranks.run(2, tiny.train, longer)
    rows = first["rows"] + [halves[0]["rows"][step] + halves[1]["rows"][step] for step in range(3)]
    list(consumed(longer.run.directory, tmp_path / "list"))
    proved = [tuple(map(int, line.split())) for line in (tmp_path / "list").read_text().splitlines()]
    prepared = open_prepared(longer.data, {})
    reader, source_shards = Reader(prepared.shards("train")), prepared.sets["train"].source_shards
    assert [reader.read(*place)[0][:-1].tolist() for place in proved] == [row for step in rows for row in step]
    owners = ["ab"[shard >= source_shards[0]] for shard, _ in proved]
    assert [owners[at : at + 8].count("a") for at in range(0, 72, 8)] == [6, 6, 6, 0, 0, 0, 4, 4, 4]
    never_changed = Mixture(reader.shard_samples, source_shards, Shares([Stage(0, (1.0, 1.0))]), 4, 8).take(0, 100)
    for name, count in (("a", 30), ("b", 42)):
        plain = [tuple(place) for place in never_changed.tolist() if "ab"[place[0] >= source_shards[0]] == name]
        assert [place for place, owner in zip(proved, owners) if owner == name] == plain[:count]


def test_a_source_that_diverged_is_in_the_line_and_one_without_targets_is_not(base):
    sources = [{"path": str(base / "corpus"), "weight": 1}] * 3
    config = tiny.recipe(base, "labels", data={"sources": sources})
    found = by_source(config, [(math.nan, 4.0), (0.0, 0.0), (6.0, 3.0)])
    label = f"{base}/corpus"
    assert list(found) == [f"{label}, 1", f"{label}, 3"] and math.isnan(found[f"{label}, 1"])
    assert found[f"{label}, 3"] == 2.0
