"""The file of a Flyte pipeline: what it asks for, and what is refused before there is one."""

import ast
from pathlib import Path

import pytest

from windlass.errors import SeveralErrors, UserError
from windlass.launch.config import FlyteConfig
from windlass.launch.flyte import check_flyte_parts, check_no_secret, check_tasks, driver, ranks_per_node


def calls(text, name):
    """Of each call of `name`: its keywords with plain values."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    named = [call for call in found if ast.unparse(call.func).rpartition(".")[2] == name]
    return [{word.arg: ast.unparse(word.value).strip("'") for word in call.keywords} for call in named]


def test_the_pipeline_asks_for_what_the_recipe_names():
    flyte = FlyteConfig(image="i:1", cpu=8, memory="64Gi", gpu="H200:8", shm="16Gi", nodes=2, retries=5, mount="/runs")
    text = driver(flyte, "mine", 8)
    assert calls(text, "Resources") == [
        {"cpu": "8", "memory": "64Gi"},
        {"cpu": "8", "memory": "64Gi", "gpu": "H200:8", "shm": "16Gi"},
    ]
    assert calls(text, "ElasticRanks") == [{"nnodes": "2", "nproc_per_node": "8", "max_restarts": "0"}]
    assert calls(text, "task") == [{"retries": "5", "report": "True"}]
    assert [call["name"] for call in calls(text, "TaskEnvironment")] == ["windlass-prepare", "mine-train", "mine"]
    assert "i:1" in text and len(text.splitlines()) < 60


def test_parts_are_tasks_of_the_cached_preparation():
    text = driver(FlyteConfig(image="i:1", cpu=8, retries=5, mount="/runs", prepare_parts=7), "mine", 1)
    assert calls(text, "Resources") == [{"cpu": "8"}, {"cpu": "8"}]
    environments = calls(text, "TaskEnvironment")
    assert [call["name"] for call in environments] == ["windlass-parts", "windlass-prepare", "mine-train", "mine"]
    assert ["cache" in call for call in environments] == [False, True, False, False]
    assert [call.get("depends_on") for call in environments] == [
        *(None, "[parts_env]", None, "[prepare_env, train_env]"),
    ]
    assert [call["retries"] for call in calls(text, "task")] == ["5"] * 4
    functions = {
        node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert list(functions) == ["tokenizer", "part", "join", "prepare", "train", "pipeline"]
    under = {name: ast.unparse(node.decorator_list[0]).split(".")[0] for name, node in functions.items()}
    assert [under[name] for name in ("tokenizer", "part", "join", "prepare")] == [*["parts_env"] * 3, "prepare_env"]
    assert "number, 7)" in text and "range(7)" in text and len(text.splitlines()) < 85


@pytest.mark.parametrize(
    ("mount", "place", "said"),
    [
        (None, "data", "launch.flyte.prepare_parts=7 without launch.flyte.mount"),
        ("/runs", "/tmp/x", "prepare_parts=7, and data.directory=/tmp/x with the volume mounted at /runs"),
    ],
)
def test_parts_that_could_not_be_joined_are_refused(mount, place, said):
    with pytest.raises(UserError, match=said):
        check_flyte_parts(FlyteConfig(image="i:1", mount=mount, prepare_parts=7), "data.directory", Path(place))
    for kept in ("data", "/runs/data"):
        check_flyte_parts(FlyteConfig(image="i:1", mount="/runs", prepare_parts=7), "data.directory", Path(kept))


def test_what_is_not_named_is_the_clusters():
    assert calls(driver(FlyteConfig(), "mine", 1), "Resources") == [{}, {}]


@pytest.mark.parametrize(
    ("changes", "has_remote", "said"),
    [
        ({"image": None}, False, "launch.flyte.image is missing"),
        ({"retries": 2}, False, "retries=2 without checkpoint.remote or launch.flyte.mount"),
        ({"nodes": 2}, True, "launch.flyte.nodes=2 without launch.flyte.mount"),
        ({"mount": "/other"}, False, "run.directory=/runs/a with the volume mounted at /other"),
    ],
)
def test_a_pipeline_that_would_lose_work_or_not_start_is_refused(changes, has_remote, said):
    with pytest.raises(UserError) as caught:
        check_tasks(FlyteConfig(**{"image": "i:1", **changes}), Path("/runs/a"), has_remote)
    assert said in caught.value.given and not isinstance(caught.value, SeveralErrors)


@pytest.mark.parametrize("changes", [{}, {"retries": 3, "mount": "/runs", "nodes": 4}])
def test_one_that_keeps_its_work_is_not(changes):
    check_tasks(FlyteConfig(image="i:1", **changes), Path("/runs/a"), has_remote=False)
    check_tasks(FlyteConfig(image="i:1", retries=3), Path("/elsewhere"), has_remote=True)


def test_a_rank_has_a_gpu_or_is_counted():
    assert [ranks_per_node(FlyteConfig(gpu=gpu), None) for gpu in (None, 4, "4", "H200:8", "RTX PRO 6000:2")] == [
        *(1, 4, 4, 8, 2)
    ]
    assert ranks_per_node(FlyteConfig(), 3) == 3 and ranks_per_node(FlyteConfig(gpu=3), 3) == 3
    with pytest.raises(UserError, match=r"--nproc 2 with launch.flyte.gpu=H200:8"):
        ranks_per_node(FlyteConfig(gpu="H200:8"), 2)


def test_no_secret_becomes_an_input():
    with pytest.raises(UserError, match="would hold a secret"):
        check_no_secret("data: {directory: https://me:pass-word-1@host/x}")
    check_no_secret("data: {directory: s3://bucket/x}")
