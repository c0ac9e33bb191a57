"""`windlass launch slurm`: what is submitted, in which order, and what is refused before anything is."""

import os
import shlex

import pytest

from tests import tiny
from tests.commands.command_line import run_command
from windlass.config import to_yaml
from windlass.data.prepare.prepare import prepare


@pytest.fixture
def base(tmp_path, monkeypatch):
    """The tiny recipe, beside an sbatch that numbers its jobs from 1 and refuses those whose names REFUSE holds."""
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(
        '#!/bin/bash\necho "sbatch $@" >> asked\ncase "$*" in *"$REFUSE"*) echo no >&2; exit 1;; esac\ngrep -c "^sbatch" asked\n'
    )
    (tmp_path / "bin/scancel").write_text('#!/bin/bash\necho "scancel $@" >> asked\n')
    for tool in sbatch.parent.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("REFUSE", "no job")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(to_yaml(tiny.recipe(tmp_path)))
    return tmp_path


def launch(arguments, monkeypatch, capsys):
    return run_command(["launch", "slurm", *shlex.split(arguments)], monkeypatch, capsys)


def asked(base):
    return (base / "asked").read_text().splitlines() if (base / "asked").exists() else []


def test_parts_are_refused_where_the_first_epoch_begins_before_they_are_joined(base, monkeypatch, capsys):
    wanted = "launch.slurm.prepare_parts=3 data.order.first_epoch=written --nodes 2 --tasks-per-node 2"
    for more in ("", " --dry-run"):
        code, printed = launch(f"tiny.yaml {wanted}{more}", monkeypatch, capsys)
        assert code == 2 and "data.order.first_epoch: written, and a preparation in parts" in printed.err
    assert asked(base) == []


def test_data_is_prepared_by_a_job_before_and_only_where_it_is_not(base, monkeypatch, capsys):
    folder = base / "run/slurm"
    code, printed = launch("tiny.yaml run.steps=12 --nodes 2 --tasks-per-node 2 --qos it\\'s", monkeypatch, capsys)
    assert code == 0, printed.err
    assert asked(base) == [
        f"sbatch --parsable {folder}/prepare.sbatch",
        f"sbatch --parsable --dependency=afterok:1 --kill-on-invalid-dep=yes {folder}/train.sbatch",
    ]
    assert printed.out.splitlines() == [
        f"job 1: prepares {base}/data",
        f"job 2: trains {base}/run on 2 x 2 = 4 ranks, after job 1",
        "to follow it:",
        "  squeue --jobs=1,2",
        f"  windlass status {base}/run",
        f"  tail -F {folder}/2.out   # segments, and how each ended; 2-NODE.log: what ranks print",
        "to stop it, saved: scontrol requeuehold 2",
    ]
    text = (folder / "train.sbatch").read_text()
    assert "#SBATCH --job-name=run\n#SBATCH --nodes=2 --ntasks-per-node=2\n#SBATCH --qos='it'\"'\"'s'\n" in text
    assert " -m windlass train tiny.yaml run.steps=12\n" in text
    assert " -m windlass prepare tiny.yaml run.steps=12\n" in (folder / "prepare.sbatch").read_text()

    config = tiny.recipe(base)
    prepare(config.data, config.evaluate.sets)
    code, printed = launch("tiny.yaml --nodes 1 --tasks-per-node 2 --job-name mine", monkeypatch, capsys)
    assert (code, asked(base)[2:]) == (0, [f"sbatch --parsable {folder}/train.sbatch"])
    (base / "corpus/000.txt").write_text("another text\n")
    launch("tiny.yaml --nodes 1 --tasks-per-node 2", monkeypatch, capsys)
    assert asked(base)[3] == f"sbatch --parsable {folder}/prepare.sbatch"
    (base / "corpus").rename(base / "elsewhere")
    launch("tiny.yaml --nodes 1 --tasks-per-node 2", monkeypatch, capsys)
    assert asked(base)[5:] == [f"sbatch --parsable {folder}/train.sbatch"]


def test_parts_are_prepared_by_an_array_between_a_tokenizer_and_a_join(base, monkeypatch, capsys):
    folder, given = base / "run/slurm", "tiny.yaml launch.slurm.prepare_parts=8 --nodes 1 --tasks-per-node 2"
    code, printed = launch(given, monkeypatch, capsys)
    assert code == 0, printed.err
    steps = ["prepare-tokenizer", "prepare-parts", "prepare-join", "train"]
    after = ["", *(f"--dependency=afterok:{job} --kill-on-invalid-dep=yes " for job in (1, 2, 3))]
    assert asked(base) == [f"sbatch --parsable {wait}{folder}/{step}.sbatch" for step, wait in zip(steps, after)]
    assert printed.out.splitlines()[:4] == [
        f"job 1: makes the tokenizer of {base}/data",
        "job 2: prepares 8 parts of it, a task each",
        "job 3: joins them",
        f"job 4: trains {base}/run on 1 x 2 = 2 ranks, after job 3",
    ]
    texts = [(folder / f"{step}.sbatch").read_text() for step in steps]
    assert [text.count("#SBATCH --nodes=1 --ntasks=1 --array=0-7\n") for text in texts] == [0, 1, 0, 0]
    for text, end in zip(texts, ("--tokenizer-only", "--part auto", "--join")):
        assert text.rstrip().endswith(f" -m windlass prepare tiny.yaml launch.slurm.prepare_parts=8 {end}")


def test_what_waits_for_a_job_that_is_refused_is_not_left_in_the_queue(base, monkeypatch, capsys):
    monkeypatch.setenv("REFUSE", "prepare-join")
    code, printed = launch("tiny.yaml launch.slurm.prepare_parts=8 --nodes 1 --tasks-per-node 2", monkeypatch, capsys)
    assert code == 2 and "sbatch refused" in printed.err and asked(base)[3:] == ["scancel 1", "scancel 2"]


def test_a_dry_run_prints_the_scripts_alone(base, monkeypatch, capsys):
    code, printed = launch("tiny.yaml --nodes 2 --gpus-per-node 2 --time 1:00:00 --dry-run", monkeypatch, capsys)
    lines = printed.out.splitlines()
    assert code == 0 and lines.count("#!/bin/bash") == 2 and lines[0] == "#!/bin/bash" and lines[-1] == "exit $code"
    assert (
        lines.count("#SBATCH --time=1:00:00") == 2
        and "#SBATCH --nodes=2 --ntasks-per-node=2 --gpus-per-node=2" in lines
    )
    assert not (base / "run").exists() and asked(base) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("tiny.yaml --nodes 3 --tasks-per-node 1", "micro_batch"),
        ("tiny.yaml parallel.tp=2 --nodes 2 --tasks-per-node 1", "parallel.tp=2"),
        ("tiny.yaml run.stepz=1 --nodes 1 --tasks-per-node 2", "did you mean `steps`?"),
        ("tiny.yaml --nodes 1 --tasks-per-node 2 --time soon", "is not a time limit"),
        ("tiny.yaml --nodes 1 --tasks-per-node 2 --time 3", "launch.slurm.time=3 with launch.slurm.grace_s=300"),
        ("tiny.yaml --nodes 1", "neither --gpus-per-node nor --tasks-per-node"),
        ("tiny.yaml --nodes 0 --tasks-per-node 2", "--nodes"),
        (
            "tiny.yaml 'data.sources=[{path: \"http://host/a?sign=b\"}]' --nodes 1 --tasks-per-node 2",
            "would hold a secret",
        ),
    ],
)
def test_what_is_refused_is_not_submitted(base, monkeypatch, capsys, arguments, says):
    code, printed = launch(arguments, monkeypatch, capsys)
    assert code == 2 and says in printed.err, printed
    assert asked(base) == [] and not (base / "run").exists()


def test_a_refused_job_takes_the_one_before_back(base, monkeypatch, capsys):
    monkeypatch.setenv("REFUSE", "train.sbatch")
    code, printed = launch("tiny.yaml --nodes 1 --tasks-per-node 2", monkeypatch, capsys)
    assert code == 2 and "sbatch refused" in printed.err and asked(base)[-1] == "scancel 1"


def test_sbatch_is_missed_before_anything_is_written(base, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    code, printed = launch("tiny.yaml --nodes 1 --tasks-per-node 2", monkeypatch, capsys)
    assert code == 2 and "sbatch is not installed here" in printed.err and not (base / "run").exists()
