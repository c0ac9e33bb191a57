"""test_same_loss turns red for every bug of the table that is planted in its ranks: a check that stays green proves nothing.

A cell trains without a bug and then with each of its bugs, in the same ranks and the same process group.
"""

import re

import pytest

from tests.proof.bugs import BUGS, TABLES
from tests.proof.checks import CHECKS
from tests.proof.planting import Planting, path_of, planted
from tests.proof.rows import CELLS
from windlass.proof.pool import RankFailed

STOPS = "BadLayout"  # begins what a bug says that ends its ranks, and with them what other bugs would train there


def cells() -> list:
    """(check, model, layout, names of bugs): in `make test` the first cell of each bug, of as many steps as it needs."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, bug in BUGS.items():
        for cell in bug.cells:
            steps = f"steps{bug.steps} " if cell == bug.cells[0] else ""
            alone = name if bug.said.startswith(STOPS) else ""
            found.setdefault((cell, steps, alone), []).append(name)
    made = []
    for (cell, steps, _), names in found.items():
        check, model, layout = cell.split(": ")
        marks = () if steps else pytest.mark.long
        made.append(pytest.param(check, model, steps + layout, names, id=f"{cell}: {' + '.join(names)}", marks=marks))
    return made


@pytest.mark.parametrize(("check", "model", "layout", "names"), cells())
def test_the_comparison_turns_red(references, ranks, check, model, layout, names):
    stops = [name for name in names if BUGS[name].said.startswith(STOPS)]
    pool = Planting(ranks, *(() if stops else ((),)), *(BUGS[name].patches for name in names))
    if not stops:
        CHECKS[check](references, pool, model, layout)  # green without a bug
    for name in names:
        pool.chosen = names.index(name) + (not stops)
        try:
            CHECKS[check](references, pool, model, layout)
        except AssertionError as error:
            assert re.search(BUGS[name].said, str(error)), name
            assert isinstance(error, RankFailed) == bool(stops), (
                f"{name}: ranks train on; it is the comparison that finds it"
            )
        else:
            pytest.fail(f"green: {name}")


def test_every_bug_is_seen_by_a_cell_that_is_green_without_it():
    green = {str(cell) for cell in CELLS}
    assert sum(map(len, TABLES)) == len(BUGS), "a name is one bug's"
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
