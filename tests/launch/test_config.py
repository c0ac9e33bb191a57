"""The recipe's launch block."""

import pytest
from pydantic import ValidationError

from tests import tiny
from windlass.config import load_recipe, to_yaml
from windlass.errors import UserError
from windlass.launch.config import LaunchConfig


def test_bounds():
    assert LaunchConfig().max_restarts == 3 and LaunchConfig(stall_s=0).stall_s == 0
    for wrong in ({"max_restarts": -1}, {"stall_s": -1}, {"restarts": 1}):
        with pytest.raises(ValidationError):
            LaunchConfig(**wrong)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            "kubernetes.environment={A B: 1}",
            "must be a variable's name: letters, digits and underscores, no digit first",
        ),
        ("sky.environment={1st: 1}", "must be a variable's name"),
        ("sky.secrets=[A-B]", "must be a variable's name"),
        ("kubernetes.secrets={A=B: store/key}", "must be a variable's name"),
        ("kubernetes.secrets={A: store}", "must be SECRET/KEY, as the cluster names them: store/secret"),
        ("kubernetes.namespace=My_Own", "must be a label: lower-case letters, digits and inner dashes"),
        ("kubernetes.claim=a_b", "must be a name of Kubernetes"),
        ("kubernetes.runtime=Torch", "must be a name of Kubernetes"),
        ("kubernetes.memory=400GB", "must be a whole number and a unit: 400Gi, or 400G"),
        ('kubernetes.memory="400Gi\\n"', "must be a whole number and a unit"),
        ("flyte.memory=400G", "must be a whole number and Mi, Gi or Ti: 400Gi"),
        ("flyte.shm=16", "must be text"),
        ("flyte.gpu=H200x8", "must be a count, or a kind and a count: H200:8"),
        ("kubernetes.mount=runs", "must be an absolute path, such as /runs"),
        ("sky.mount=runs", "must be an absolute path"),
        ("flyte.mount=/", "must be an absolute path"),
    ],
)
def test_how_a_text_is_written_is_said_and_the_command_that_explains_the_key_works(tmp_path, given, says):
    with pytest.raises(UserError) as caught:
        load_recipe(write_recipe(tmp_path), f"launch.{given}")
    key = given.partition("=")[0]
    assert says in caught.value.rule and "pattern" not in str(caught.value)
    assert caught.value.change == f"`windlass keys launch.{key}` explains the key"


def write_recipe(folder):
    (folder / "r.yaml").write_text(to_yaml(tiny.recipe(folder)))
    return folder / "r.yaml"
