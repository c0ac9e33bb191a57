"""`windlass prepare --tokenizer-only`, `--part` and `--join` as they are typed, and the part that a scheduler names."""

import subprocess
import sys

import pytest

from tests import tiny
from tests.commands.command_line import run_command
from windlass.commands import prepare_parts as room
from windlass.commands.prepare_parts import array_task
from windlass.config import to_yaml
from windlass.data.prepare.prepare import open_prepared, prepare
from windlass.errors import UserError

SLURM = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_ARRAY_TASK_MIN": "1"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "3"}


def chosen(monkeypatch, text, environ):
    monkeypatch.setattr(room, "array_task", lambda: array_task(environ))
    return str(room.chosen_part(text))


@pytest.mark.parametrize(
    ("text", "environ", "part"),
    [
        ("2/3", SLURM, "2/3"),
        ("auto", SLURM, "4/8"),
        ("auto/8", SLURM, "4/8"),
        ("auto/8", KUBERNETES, "3/8"),
    ],
)
def test_a_part_is_given_or_named_by_the_scheduler(monkeypatch, text, environ, part):
    assert chosen(monkeypatch, text, environ) == part


@pytest.mark.parametrize(
    ("text", "environ", "given", "change"),
    [
        (
            "auto",
            {},
            "--part auto in a process that is no task of an array",
            "start it as one, or give the part: --part 0/8",
        ),
        ("auto", KUBERNETES, "--part auto with JOB_COMPLETION_INDEX=3", "give it: --part auto/8"),
        ("auto/9", SLURM, "--part auto/9 in an array of 8 tasks", "give the part of this task: --part I/9"),
        (
            "auto/3",
            KUBERNETES,
            "--part auto/3 with JOB_COMPLETION_INDEX=3",
            "give the number of tasks that the array has: --part auto/4, or more",
        ),
        ("auto/x", KUBERNETES, "--part auto/x", "for example --part 0/8, ... --part 7/8"),
        ("auto/8", {"JOB_COMPLETION_INDEX": ""}, "JOB_COMPLETION_INDEX=", "give the part: --part I/N"),
        ("auto", {"SLURM_ARRAY_TASK_ID": "x"}, "SLURM_ARRAY_TASK_ID=x", "give the part: --part I/N"),
        ("auto", SLURM | {"SLURM_ARRAY_TASK_COUNT": "x"}, "SLURM_ARRAY_TASK_COUNT=x", "give the part: --part I/N"),
    ],
)
def test_what_names_no_part_is_refused(monkeypatch, text, environ, given, change):
    with pytest.raises(UserError) as caught:
        chosen(monkeypatch, text, environ)
    assert (caught.value.given, caught.value.change) == (given, change)


def test_three_commands_are_one_preparation(tmp_path, monkeypatch, capsys):
    config = tiny.recipe(tmp_path)
    (tmp_path / "tiny.yaml").write_text(to_yaml(config))
    recipe = str(tmp_path / "tiny.yaml")
    code, printed = run_command(["prepare", recipe, "--part", "0/2"], monkeypatch, capsys)
    assert (
        code == 2 and "make it first, where the parts find it: windlass prepare RECIPE --tokenizer-only" in printed.err
    )
    for words in (["--tokenizer-only"], ["--part", "1/2"], ["--part", "0/2"], ["--join", "--data-only"]):
        code, printed = run_command(["prepare", recipe, *words], monkeypatch, capsys)
        assert code == 0, printed
    assert "train: 5" in printed.out and "samples" in printed.out
    found = open_prepared(config.data, config.evaluate.sets)
    one = config.data.model_copy(update={"directory": str(tmp_path / "one")})
    assert prepare(one, config.evaluate.sets, log=lambda line: None).files == found.files
    code, printed = run_command(["prepare", recipe, "--join", "--part", "0/2"], monkeypatch, capsys)
    assert code == 2 and printed.err.startswith("windlass: --part with --join\n")


def test_a_part_loads_no_torch():
    code = "import sys, windlass.commands.prepare_parts; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def slurm_array(task, first=0, of=8, **more):
    found = {"SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_TASK_MIN": first, "SLURM_ARRAY_TASK_COUNT": of, **more}
    return {name: str(value) for name, value in found.items()}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        (slurm_array(0), (0, 8)),
        (slurm_array(8, first=1), (7, 8)),
        (slurm_array(15, first=1, SLURM_ARRAY_TASK_STEP=2), (7, 8)),
        ({"SLURM_ARRAY_TASK_ID": "2"}, (2, None)),
        ({"JOB_COMPLETION_INDEX": "0"}, (0, None)),
        ({"BATCH_JOB_ARRAY_INDEX_VAR_NAME": "FLYTE_K8S_ARRAY_INDEX", "FLYTE_K8S_ARRAY_INDEX": "4"}, (4, None)),
        (
            {
                "BATCH_JOB_ARRAY_INDEX_VAR_NAME": "FLYTE_K8S_ARRAY_INDEX",
                "FLYTE_K8S_ARRAY_INDEX": "1",
                "BATCH_JOB_ARRAY_INDEX_OFFSET": "6",
            },
            (7, None),
        ),
        ({"BATCH_JOB_ARRAY_INDEX_VAR_NAME": "FLYTE_K8S_ARRAY_INDEX"}, None),
    ],
)
def test_a_task_of_an_array_is_numbered_from_0(environ, found):
    task = array_task(environ)
    assert found == (None if task is None else task[1:])


@pytest.mark.parametrize("environ", [slurm_array(5, of=3), slurm_array(2, first=1, SLURM_ARRAY_TASK_STEP=2)])
def test_an_array_that_is_not_numbered_evenly_is_refused(environ):
    with pytest.raises(UserError) as caught:
        array_task(environ)
    assert "in an array of" in caught.value.given and "--part I/N" in caught.value.change
