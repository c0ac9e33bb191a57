"""test_same_loss turns red for every bug of the table that is planted in its ranks: a check that stays green proves nothing."""

import pytest

from tests.proof.bugs import BUGS, TABLES
from tests.proof.checks import CHECKS
from tests.proof.planting import Planting, path_of, planted
from tests.proof.rows import CELLS
from windlass.proof.pool import RankFailed

RED = [
    pytest.param(name, cell, id=f"{name}: {cell}", marks=() if cell == bug.cells[0] else pytest.mark.long)
    for name, bug in BUGS.items()
    for cell in bug.cells
]
GREEN = ("exact: qwen3 tied: zero0 replicate2", "exact: qwen3_moe: expert2 shard2", "policy: qwen3 tied: shard2 bf16")


def check(references, ranks, cell):
    name, model, layout = cell.split(": ")
    CHECKS[name](references, ranks, model, layout)


@pytest.mark.parametrize(("name", "cell"), RED)
def test_the_comparison_turns_red(references, ranks, name, cell):
    bug = BUGS[name]
    with pytest.raises(AssertionError, match=bug.said or None) as caught:
        check(references, Planting(ranks, bug.patches), cell)
    stopped = bug.said.startswith("BadLayout")
    assert isinstance(caught.value, RankFailed) == stopped, "the ranks trained on; it is the comparison that finds it"


@pytest.mark.parametrize("cell", [GREEN[0], *(pytest.param(cell, marks=pytest.mark.long) for cell in GREEN[1:])])
def test_without_a_bug_the_same_road_is_green(references, ranks, cell):
    check(references, Planting(ranks, ()), cell)


def test_every_bug_is_seen_by_a_cell_that_is_green_without_it():
    green = {str(cell) for cell in CELLS}
    assert sum(map(len, TABLES)) == len(BUGS), "a name stands for one bug"
    for name, bug in BUGS.items():
        assert bug.cells or bug.verify or bug.mistake, name
        for cell in bug.cells:
            assert cell in green or cell.removesuffix(" fp32") in green, (name, cell)


@pytest.mark.parametrize("name", BUGS)
def test_every_patch_applies(name):
    for file, text, instead in BUGS[name].patches:
        assert path_of(file).read_text().count(text) == 1 and instead != text, f"{file}: {text!r}"
    with planted(BUGS[name].patches):
        pass
