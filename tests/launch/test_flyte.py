"""The file of a Flyte pipeline: what it asks for, and what is refused before there is one."""

import ast
from pathlib import Path

import pytest

from windlass.errors import SeveralErrors, UserError
from windlass.launch.config import FlyteConfig
from windlass.launch.flyte import check_no_secret, check_tasks, driver, ranks_per_node


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
