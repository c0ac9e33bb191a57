"""Packing, isolation and mixtures as a run meets them: the same on one rank and two, and told before the first step."""

import math

import pytest

from tests import tiny
from windlass.commands.evaluate import evaluate
from windlass.data.prepare.prepare import open_prepared
from windlass.errors import UserError


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
    told = derived(config.run.directory)["packing"]
    assert told.startswith("best-fit, ") and told.endswith("% full; documents attend to themselves alone")
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
    told = derived(config.run.directory)
    assert told["source 1"].startswith(f"{base}/corpus: asked 25 %, gets 25 % (1 of 4 samples), ")
    assert told["source 2"].startswith(f"{base}/more: asked 75 %, gets 75 % (3 of 4 samples), ")
    assert " epochs of " in told["source 2"]


def test_a_mixture_has_no_epochs(base):
    sources = [{"path": "a", "weight": 1}, {"path": "b", "weight": 3}]
    with pytest.raises(UserError) as caught:
        tiny.recipe(base, data={"sources": sources}, run={"steps": None, "epochs": 2})
    assert caught.value.given == "run.epochs=2 with 2 sources in data.sources that have weights"
    assert "set run.tokens or run.steps" in caught.value.change
