"""What is refused before something lasting happens: nothing is prepared, replaced or made."""

import pytest

from tests import tiny
from windlass.errors import UserError
from windlass.training.preflight import make_ready


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"max_position_embeddings": 8}}, "for a model of 8 positions"),
        ({"run": {"micro_batch": 3}}, "sequences per step must be a multiple"),
        ({"run": {"start_from": "nowhere"}}, "nowhere does not exist"),
        ({"run": {"directory": __file__}}, "is a file"),
        ({"run": {"directory": __file__ + "/run"}}, "is a file"),
    ],
)
def test_a_refused_recipe_leaves_no_trace(tmp_path, sections, said):
    config = tiny.recipe(tmp_path, **sections)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError) as refused:
        make_ready(config, 1, "cpu")
    assert said in str(refused.value)
    assert sorted(tmp_path.iterdir()) == before
