"""benchmarks/shuffle.py: its measures on orders whose values are known, and the rows that docs/scale.md shows, made again."""

import json
from statistics import mean

import numpy as np
import pytest

from tests.docs.test_techniques import DOCS, ROOT, beside, fill

script = beside(ROOT / "benchmarks", "shuffle")
KEPT = json.loads(script.RESULTS.read_text())
ROWS = {(row["order"], row["window"], row["lanes"], row["batch"]): row for row in KEPT["order"]["rows"]}


def test_the_distance_of_a_batch_is_half_of_all_differences_of_shares():
    """Two sources with shares 3/4 and 1/4, batches of 4; the rest of two is no batch."""
    sources_N = np.array([0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1])
    assert script.share_distances(sources_N[:-4], 4).tolist() == pytest.approx([0.25, 0, 0.75, 0.25, 0.25])
    sources_N = np.array([0, 1, 2, 0, 1, 2, 0, 0, 0, 1])
    assert script.share_distances(sources_N, 3).tolist() == pytest.approx([1 / 6, 1 / 6, 0.5]), "of 5, 3 and 2 of 10"


@pytest.mark.parametrize(
    ("stream", "batch", "apart", "together"),
    [
        ([0, 1, 2, 3], 2, 1 / 4, 2 / 3),  # 0 1 | 2 3
        ([0, 1, 2, 3], 4, 1 / 4, 1),
        ([0, 2, 1, 3], 2, (2 + 1 + 2) / 3 / 4, 0),  # positions 0 2 1 3
        ([2, 0, 3, 1], 2, (2 + 3 + 2) / 3 / 4, 0),  # positions 1 3 0 2
        ([1, 2, 0, 3], 2, (2 + 1 + 2) / 3 / 4, 1 / 3),  # positions 2 0 1 3
        ([1, 0, 3, 2], 2, (1 + 3 + 1) / 3 / 4, 2 / 3),  # positions 1 0 3 2
    ],
)
def test_neighbours_are_found_by_their_places_in_the_stream(stream, batch, apart, together):
    found = script.neighbours(np.array(stream), batch)
    assert found == (pytest.approx(apart), pytest.approx(together))


@pytest.mark.parametrize("kind, lanes", [("global", 1), ("none", 1), ("plain", 1), ("lanes", 4)])
def test_every_order_is_a_permutation(kind, lanes):
    assert sorted(script.stream_of(kind, 2, lanes, 8, shards=16, samples=8)) == list(range(128))


def test_a_random_permutation_has_the_values_that_its_formulas_give():
    for batch in script.BATCHES:
        row = ROWS["global", 0, 1, batch]
        total = script.SHARDS * script.SAMPLES
        assert row["apart"] == pytest.approx(1 / 3, abs=1e-3)
        share = (batch - 1) / (total - 1)
        assert row["together"] == pytest.approx(share, abs=4 * (share / total) ** 0.5)  # four standard deviations


def test_the_kept_rows_are_all_that_the_script_makes_and_one_is_made_again():
    asked = [("global", 0, 1), *(("plain", window, 1) for window in (8, 64, 512))]
    asked += [("lanes", 8, 8), ("lanes", 8, 64), ("lanes", 16, 64), ("none", 0, 1)]
    assert list(ROWS) == [(*one, batch) for one in asked for batch in (64, 512, 4096)]
    for kind, window, lanes, batch in (("lanes", 8, 64, 512), ("none", 0, 1, 64)):
        assert script.measure(kind, window, lanes, batch) == ROWS[kind, window, lanes, batch]


def test_lanes_mix_as_the_plain_order_of_as_many_shards_and_a_host_reads_its_part():
    for lanes in script.LANES:
        for batch in script.BATCHES:
            own, plain = ROWS["lanes", 8, lanes, batch], ROWS["plain", 8 * lanes, 1, batch]
            assert own["distance_mean"] <= 1.001 * plain["distance_mean"]
            assert own["apart"] == pytest.approx(plain["apart"], rel=0.01)
            assert own["together"] <= 1.01 * plain["together"]
            assert (own["shards_per_host"], plain["shards_per_host"]) == (script.SHARDS // lanes, script.SHARDS)


@pytest.mark.parametrize("order", script.TRAINED)
def test_each_order_was_trained_once_per_seed_over_the_same_shards(order):
    rows = [row for row in KEPT["train"]["rows"] if row["order"] == order]
    assert [row["seed"] for row in rows] == [0, 1, 2]
    assert len({(row["steps"], row["shards"]) for row in KEPT["train"]["rows"]}) == 1


def test_what_is_not_shuffled_learns_worse_than_any_shuffled_order():
    losses = {
        order: [row["validation"] for row in KEPT["train"]["rows"] if row["order"] == order] for order in script.TRAINED
    }
    assert min(losses["none"]) > max(losses["global"] + losses["plain"] + losses["lanes"])
    assert abs(mean(losses["lanes"]) - mean(losses["global"])) < mean(losses["none"]) - mean(losses["global"])


def test_the_page_shows_the_rows():
    page = DOCS / "scale.md"
    assert page.read_text("utf-8") == fill.filled(page), "run `make docs`"


@pytest.mark.long
def test_a_small_corpus_is_trained_in_every_order(tmp_path):
    (tmp_path / "english.txt").write_text("\n".join(f"They say yeah, and agree on {row}." for row in range(2_000)))
    talks = [{"transcript": f"Yeah. {row} " * 200} for row in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    size = script.Size(source_chars=60_000, vocabulary=300, hidden_size=32, shard_samples=10)
    rows = list(script.trained(tmp_path, tmp_path / "english.txt", tmp_path, size, seeds=(0,)))
    assert [row["order"] for row in rows] == list(script.TRAINED)
    assert len({row["validation"] for row in rows}) == 4 and all(0 < row["validation"] < 7 for row in rows)
    assert len({(row["steps"], row["shards"]) for row in rows}) == 1
