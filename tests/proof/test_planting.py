"""A bug is in the running process while it is planted, whoever has imported the function, and gone afterwards."""

import pytest

from tests.proof.planting import planted
from windlass.optim.config import OptimConfig
from windlass.optim.schedule import learning_rate
from windlass.parallel.expert import _Exchange
from windlass.parallel.mesh import Mesh

SCHEDULE = "optim/schedule.py"
CONFIG = OptimConfig(learning_rate=1.0, warmup_steps=2)


def test_an_imported_function_changes_and_changes_back():
    def rate():
        return learning_rate(0, 10, CONFIG)

    with planted([(SCHEDULE, "update = min(step + 1, total_steps)", "update = min(step, total_steps)")]):
        assert rate() == 0.0
    assert rate() == 0.5
    twice = [
        (SCHEDULE, "min(step + 1, total_steps)", "step + 2"),
        (SCHEDULE, "return peak * update / warmup", "return 7.0"),
    ]
    with pytest.raises(ZeroDivisionError), planted(twice):
        assert rate() == 7.0
        raise ZeroDivisionError
    assert rate() == 0.5, "whatever ends it"


def test_properties_and_static_methods_are_found():
    behind, backward = Mesh.batch_rank.fget, _Exchange.backward
    codes = behind.__code__, backward.__code__
    patches = [
        ("parallel/mesh.py", 'dense["replicate", "fsdp"] if', 'dense["fsdp"] if'),
        ("parallel/mesh.py", 'return self.coordinate["replicate"] * self.layout.shard', "return 5"),
        ("parallel/expert.py", "sent_X, received_X = ctx.sizes", "received_X, sent_X = ctx.sizes"),
    ]
    with planted(patches):
        assert Mesh.batch_rank.fget is behind and behind.__code__ is not codes[0]
        assert _Exchange.backward is backward and backward.__code__ is not codes[1]
    assert (behind.__code__, backward.__code__) == codes


@pytest.mark.parametrize(
    ("text", "instead", "said"),
    [
        ("nowhere to be found", "x", "has this 0 times"),
        ("update", "x", r"has this \d+ times"),
        ("return peak\n", "return peak\n", "this changes nothing"),
        ("import math\n", "import cmath\n", "line .* is in no function"),
    ],
)
def test_a_patch_that_would_plant_nothing_is_an_error(text, instead, said):
    with pytest.raises(AssertionError, match=said), planted([(SCHEDULE, text, instead)]):
        pass
    assert learning_rate(0, 10, CONFIG) == 0.5
