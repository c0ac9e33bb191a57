"""Names of jobs: refused in words as given, made of the run directory's with a word about it."""

from pathlib import PurePath

import pytest

from windlass.errors import UserError
from windlass.launch.job_names import NAME, job_name


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("runs/mine", "mine"),
        ("runs/Demo_v2", "demo-v2"),
        ("runs/124M", "run-124m"),
        ("runs/größe (copy)", "gr-e-copy"),
        (f"runs/{'a' * 39}-b", "a" * 39),
        (f"runs/7{'b' * 60}", f"run-7{'b' * 35}"),
        ("runs/--x..", "x"),
    ],
)
def test_a_run_directorys_name_is_made_one_that_every_cluster_takes_and_that_is_said(run, name, capsys):
    assert job_name(None, PurePath(run)) == name and NAME.fullmatch(name)
    said = f"the job is called {name}, after {run}; --job-name gives it another name\n"
    assert capsys.readouterr() == ("", "" if name == PurePath(run).name else said)


@pytest.mark.parametrize("name", ["Mine", "1st", "a_b", "a" * 41, "mine-", "", "a.b", "a\n"])
def test_a_name_that_no_cluster_takes_is_refused_as_given(name, capsys):
    with pytest.raises(UserError) as caught:
        job_name(name, PurePath("mine"))
    assert caught.value.given.startswith("`") and "--job-name" in caught.value.change
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("run", [".", "..", "runs/___", "数据"])
def test_a_run_directory_that_gives_no_name_asks_for_one(run):
    with pytest.raises(UserError, match="`` as the name of a job"):
        job_name(None, PurePath(run))
