"""`windlass launch nodes`: what is wrong ends with exit code 2, before hosts meet."""

import sys

import pytest

from tests import tiny
from windlass.cli import main as cli
from windlass.config import to_yaml

MEET = ["--nodes", "2:3", "--endpoint", "node-1:29400", "--nproc", "1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "1:2", "--endpoint", "node-1:29400"], "windlass: --nodes 1:2"),
        (["--nodes", "2:3", "--endpoint", "node-1"], "windlass: --endpoint node-1\n"),
        (["--nodes", "2:3"], "'--endpoint'"),
        ([*MEET, "run.stepz=3"], "run.stepz"),
        # 12 sequences of two rows each are for 2 and 3 ranks, 8 are for 2 alone
        ([*MEET, "run.tokens_per_step=128"], "windlass: 3 hosts with 1 rank each: "),
        (
            [*MEET, "run.tokens_per_step=192", "parallel.pp=2", "parallel.zero=1"],
            "windlass: 3 hosts with 1 rank each: ",
        ),
    ],
)
def test_a_mistake_costs_no_start(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "tiny.yaml").write_text(to_yaml(tiny.recipe(tmp_path)))
    monkeypatch.setattr(sys, "argv", ["windlass", "launch", "nodes", str(tmp_path / "tiny.yaml"), *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2 and words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("steps", "code", "after"), [([], 130, "nothing was saved"), ([3], 75, "the same command goes on")]
)
@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("windlass.launch.nodes.launch_nodes", ["launch", "nodes", "tiny.yaml", *MEET, "run.tokens_per_step=192"]),
        ("windlass.launch.local.launch_ranks", ["train", "tiny.yaml", "--nproc", "2"]),
    ],
)
def test_a_signal_before_ranks_begin_says_whether_the_run_goes_on(
    launcher, words, steps, code, after, tmp_path, monkeypatch, capsys
):
    def wait(*_):
        raise KeyboardInterrupt

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(to_yaml(tiny.recipe(tmp_path)))
    monkeypatch.setattr(launcher, wait)
    monkeypatch.setattr("windlass.training.interruptible.committed_steps", lambda _: steps)
    monkeypatch.setattr(sys, "argv", ["windlass", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    said = capsys.readouterr().err
    assert caught.value.code == code and "windlass: interrupted before the first step; " in said and after in said
