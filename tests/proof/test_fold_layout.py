"""Which small layouts represent a recipe's."""

import pytest

from windlass.errors import UserError
from windlass.parallel.config import ParallelConfig
from windlass.proof.fold_layout import AXES, fold_onto_ranks


def folded(ranks=None, most=8, **given):
    return fold_onto_ranks(ParallelConfig(**given), ranks, most)


def names(folding):
    return [cell.name for cell in folding.cells]


def test_a_layout_that_fits_is_proved_as_it_is():
    folding = folded(pp=2, shard=2, tp=2)
    assert names(folding) == ["pp 2 x shard 2 x tp 2, zero 1, 1f1b"] and not folding.unproved
    assert names(folded(4, shard=3)) == ["shard 3, zero 3"], "ranks at hand may be more"
    assert names(folded(zero=0, replicate=3)) == ["replicate 3, zero 0"]


def test_an_open_axis_takes_what_is_left_of_the_ranks_or_two():
    assert names(folded(4)) == ["shard 4, zero 3"] and not folded(4).unproved
    assert names(folded(6, replicate=2)) == ["replicate 2 x shard 3, zero 3"]
    assert names(folded(2, zero=0)) == ["replicate 2, zero 0"]
    alone = folded()
    assert names(alone) == ["shard 2, zero 3"] and "parallel.shard=-1 on more than 2 ranks" in alone.unproved[0]
    assert names(folded(1)) == ["one process, zero 3"]
    auto = folded(4, zero="auto")
    assert names(auto) == ["shard 4, zero 3"] and auto.unproved == [
        "parallel.zero=auto: proved as zero 3; where a run chooses another, verify it with that number"
    ]


def test_ranks_that_the_layout_does_not_fill_are_refused():
    with pytest.raises(UserError, match="a multiple of tp = 2"):
        folded(3, tp=2)


def test_long_axes_are_two_ranks_each():
    folding = folded(pp=4, shard=8)
    assert names(folding) == ["pp 2 x shard 2, zero 1, 1f1b"]
    assert "pp 4, shard 8" in folding.unproved[0]


@pytest.mark.parametrize(("ranks", "cells", "word"), [(2, 4, "single axes"), (4, 6, "pairs"), (8, 4, "triples")])
def test_more_axes_than_ranks_are_proved_in_parts(ranks, cells, word):
    folding = folded(ranks, pp=2, replicate=2, shard=2, tp=2)
    assert len(folding.cells) == cells and all(cell.world == ranks for cell in folding.cells)
    assert f"on {ranks} {word}" in folding.unproved[-1] and "pp, replicate, shard, tp" in folding.unproved[-1]
    assert len(set(names(folding))) == cells
    for cell in folding.cells:
        assert sum(getattr(cell.layout, axis) > 1 for axis in AXES) == ranks.bit_length() - 1


def test_one_rank_holds_no_axis():
    with pytest.raises(UserError) as caught:
        folded(1, tp=2, shard=2)
    assert caught.value.given == "--nproc 1 for a layout over shard, tp" and "--nproc 2" in caught.value.change
    assert names(folded(1, shard=-1)) == ["one process, zero 3"]


def test_expert_ranks_that_the_layout_does_not_have_are_refused():
    with pytest.raises(UserError, match=r"parallel.expert=2 with parallel.shard=1"):
        folded(shard=1, replicate=2, expert=2)
    parts = folded(2, pp=2, shard=2, expert=2)
    assert [cell.layout.expert for cell in parts.cells] == [1, 2]


def test_settings_of_an_axis_go_with_it():
    zbv = folded(2, pp=2, shard=2, tp=2, schedule="zbv")
    assert names(zbv) == ["pp 2, zero 1, zbv", "shard 2, zero 1", "tp 2, zero 1"]
    ahead = folded(2, shard=4, tp=2, prefetch=1)
    assert [cell.parallel.prefetch for cell in ahead.cells] == [1, 0]


def test_a_cells_config_loads_again_and_gives_its_layout():
    for cell in [*folded(4, pp=2, replicate=2, shard=2, tp=2).cells, *folded(2).cells]:
        again = ParallelConfig(**cell.parallel.model_dump())
        assert again.layout(cell.world) == cell.layout


def test_experts_are_dealt_over_two_ranks_where_they_do_not_fit():
    assert names(folded(8, shard=8, expert=4)) == ["shard 8 x expert 4, zero 3"]
    folding = folded(expert=8)
    assert names(folding) == ["shard 2 x expert 2, zero 3"] and "parallel.expert=8" in folding.unproved[0]
    parts = folded(4, shard=4, expert=4, tp=2, context=2)
    assert names(parts) == [
        "shard 2 x context 2 x expert 2, zero 3",
        "shard 2 x tp 2 x expert 2, zero 3",
        "context 2 x tp 2 x expert 2, zero 3",
    ]
