"""Batch scripts: their text, what they do with each exit code, and how they are submitted. What SLURM makes of them is
test_slurm_cluster.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.errors import Unavailable, UserError
from windlass.launch.config import LaunchConfig
from windlass.launch.slurm import Size, prepare_scripts, size_of, submit_slurm, train_script

SITE = {
    "partition": "a100",
    "account": "llm",
    "time": "4:00:00",
    "cpus_per_task": 8,
    "container": "apptainer exec --nv t.sif",
}
SITE |= {"setup": ["module load cuda/13"], "environment": {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_IB_HCA": "=mlx5_0:1"}}


EIGHT = Size(2, 4, 4)


def script(run, slurm=None, size=EIGHT, **launch):
    config = LaunchConfig(slurm=slurm or {}, **launch)
    return train_script(config, size, Path(run), "mine", ["train", "recipe.yaml", "run.steps=10", "data={a: 'b c'}"])


def options(text):
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def srun_of(text):
    return text[text.index("\nsrun ") + 1 :].partition("code=$?")[0].replace("\\\n  ", "").strip()


def test_the_site_of_the_recipe_is_in_the_script():
    text = script("/shared/runs/mine", SITE, max_restarts=5)
    assert options(text) == [
        "--job-name=mine",
        "--nodes=2 --ntasks-per-node=4 --gpus-per-node=4",
        "--cpus-per-task=8",
        "--partition=a100",
        "--account=llm",
        "--time=4:00:00",
        f"--chdir={Path.cwd()}",
        "--output=/shared/runs/mine/slurm/%j.out --open-mode=append",
        "--requeue",
        "--signal=USR1@300",
    ]
    assert "\nmodule load cuda/13\nexport NCCL_SOCKET_IFNAME=ib0\nexport NCCL_IB_HCA==mlx5_0:1\n" in text
    assert srun_of(text) == (
        'srun --kill-on-bad-exit=0 --wait=600 --open-mode=append --output="${log//%/%%}-%N.log" --cpus-per-task=8 '
        "--cpu-bind=cores --gpu-bind=none env --block-signal=TERM,INT,HUP,USR1 "
        "apptainer exec --nv t.sif python3 -m windlass train recipe.yaml run.steps=10 'data={a: '\"'\"'b c'\"'\"'}'"
    )
    assert " -gt 5 ]" in text and "6 segments without a new checkpoint" in text


def test_without_a_site_it_names_this_interpreter_and_nothing_of_gpus():
    text = script("/runs/50% of a", size=Size(1, 2))
    assert options(text)[:2] == ["--job-name=mine", "--nodes=1 --ntasks-per-node=2"]
    assert "--output='/runs/50%% of a/slurm/%j.out' --open-mode=append" in options(text)
    assert "gpu" not in text and "cpu-bind" not in text
    assert f"{sys.executable} -m windlass train" in srun_of(text)


def test_preparing_is_one_task_and_its_options_come_last():
    config = LaunchConfig(slurm=SITE | {"options": ["--exclusive"], "prepare_options": ["--partition=cpu"]})
    text = prepare_scripts(config, Path("/runs/mine"), "mine", ["prepare", "recipe.yaml"])["prepare"]
    assert options(text)[1] == "--nodes=1 --ntasks=1" and options(text)[-2:] == ["--exclusive", "--partition=cpu"]
    assert srun_of(text).endswith("t.sif python3 -m windlass prepare recipe.yaml") and "requeue" not in text


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """SLURM's commands as stubs: srun ends with the next of CODES, once it has made the next checkpoint of STEPS."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, lines in {
        "srun": 'n=$(cat n 2>/dev/null || echo 0); echo $((n + 1)) > n; set -- $STEPS; shift $n; mkdir -p "run/checkpoints/$1"\n'
        'set -- $CODES; shift $n; [ "$1" != 0 ] || echo \'{"state": "finished"}\' > run/status.json; exit "${1#unfinished-}"',
        "squeue": 'echo "$STATE"',
        "scontrol": 'echo "$@" >> asked',
        "sbatch": 'echo "$@" >> asked; echo "$SAYS" >&2; [ -z "$SAYS" ] && echo "17;east"',
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/slurm").mkdir(parents=True)
    (tmp_path / "run/slurm/7-node.log").write_text("the end of the ranks\n")
    (tmp_path / "train.sbatch").write_text(script(tmp_path / "run", size=Size(1, 2)))
    return tmp_path


def segments(cluster, codes, steps=(), state="RUNNING"):
    """Runs the script as often as SLURM would -> its exit codes, and what was asked of scontrol. `steps`: the checkpoints that
    the segments make."""
    names = " ".join(f"step-{step:08d}" if step else "." for step in (*steps, *[0] * len(codes)))
    more = {"CODES": " ".join(codes), "STEPS": names, "STATE": state, "SLURM_JOB_ID": "7"}
    (asked := cluster / "asked").touch()
    found = []
    for _ in codes:
        before = asked.read_text()
        with (cluster / "run/slurm/7.out").open("a") as out:
            done = subprocess.run(["bash", "train.sbatch"], env=os.environ | more, stdout=out, stderr=out)
        found.append(done.returncode)
        if asked.read_text() == before:
            break
    return found, asked.read_text().splitlines()


@pytest.mark.parametrize("code", [75, 1, 5, 74, 130, 137, 143, 138])
def test_the_job_goes_back_to_the_queue(cluster, code):
    assert segments(cluster, [str(code), "0"]) == ([code, 0], ["requeue 7"])


@pytest.mark.parametrize("code", [2, 3, 4, 126, 127])
def test_the_job_fails_where_only_the_user_can_mend_it(cluster, code):
    assert segments(cluster, [str(code)]) == ([code], [])
    assert "the end of the ranks" in (cluster / "run/slurm/7.out").read_text()


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_the_shell_outlives_the_signals_on_which_its_ranks_save(cluster, name):
    srun = cluster / "bin/srun"
    srun.write_text(srun.read_text().replace("\n", f"\nkill -{name} $PPID; sleep 0.1\n", 1))
    assert segments(cluster, ["75", "0"]) == ([75, 0], ["requeue 7"])


def test_0_is_for_a_run_that_is_finished(cluster):
    assert segments(cluster, ["unfinished-0", "0"]) == ([1, 0], ["requeue 7"])


@pytest.mark.parametrize("state", ["COMPLETING", ""])
def test_a_job_that_slurm_has_ended_is_left_to_slurm(cluster, state):
    assert segments(cluster, ["75"], state=state) == ([75], [])


@pytest.mark.parametrize(
    ("silent", "state", "requeued", "asked_again"),
    [(3, "RUNNING", ["requeue 7"], 3), (3, "COMPLETING", [], 3), (99, "RUNNING", [], 30)],
)
def test_a_controller_that_does_not_answer_is_asked_again(cluster, silent, state, requeued, asked_again):
    """It answers after `silent` questions."""
    answer = f'echo x >> questions; [ $(wc -l < questions) -gt {silent} ] && echo "$STATE"'
    for name, line in (("squeue", answer), ("sleep", 'echo "$@" >> slept')):
        (cluster / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (cluster / "bin" / name).chmod(0o755)
    assert segments(cluster, ["75"], state=state) == ([75], requeued)
    assert (cluster / "slept").read_text() == "10\n" * asked_again
    assert ("squeue did not answer" in (cluster / "run/slurm/7.out").read_text()) == (silent == 99)


def test_a_job_without_a_new_checkpoint_ends(cluster):
    codes, asked = segments(
        cluster, ["137"] * 9, steps=(0, 0, 0, 3)
    )  # the fourth begins where the others did, and gets on
    assert codes == [137] * 8 and asked == ["requeue 7"] * 7
    lines = (cluster / "run/slurm/7.out").read_text().splitlines()
    begun = [line.rpartition(" ")[2] for line in lines if " begins at " in line]
    assert begun == ["none"] * 4 + ["step-00000003"] * 4
    assert lines[-1] == "4 segments without a new checkpoint: the job ends with 137"


def test_a_job_that_slurm_itself_requeues_without_end_ends_too(cluster):
    (cluster / "run/slurm/7.out").write_text("segment 0 on node begins at none\n" * 4)
    assert segments(cluster, ["0"]) == ([1], []) and not (cluster / "n").exists()


def test_submitting(cluster, monkeypatch):
    file = cluster / "new/train.sbatch"
    assert submit_slurm(file, "the script\n") == "17" and file.read_text() == "the script\n"
    assert submit_slurm(file, "again\n", after="16") == "17"
    assert (cluster / "asked").read_text().splitlines() == [
        f"--parsable {file}",
        f"--parsable --dependency=afterok:16 --kill-on-invalid-dep=yes {file}",
    ]
    for said, kind in (("error: invalid partition", UserError), ("Unable to contact slurm controller", Unavailable)):
        monkeypatch.setenv("SAYS", said)
        with pytest.raises(UserError, match=f"sbatch refused {file}: {said}") as caught:
            submit_slurm(file, "")
        assert type(caught.value) is kind
    (cluster / "taken").touch()
    with pytest.raises(UserError, match=r"taken/train\.sbatch cannot be written"):
        submit_slurm(cluster / "taken/train.sbatch", "")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="sbatch is not installed here"):
        submit_slurm(file, "")


def test_sizes():
    assert size_of(2, 4, None) == (2, 4, 4) and size_of(2, None, 3) == (2, 3, 0) and size_of(2, 4, None).world == 8
    for given, says in (
        ((None, None), "neither --gpus-per-node nor"),
        ((4, 4), "--gpus-per-node 4 with --tasks-per-node 4"),
    ):
        with pytest.raises(UserError, match=says):
            size_of(2, *given)


def test_no_script_holds_a_secret_or_a_name_of_several_lines():
    secret = {"environment": {"HTTPS_PROXY": "http://me:word@proxy"}}
    for wrong, says in (
        (lambda: script("/run", secret), "would hold a secret"),
        (lambda: script("/r\nun"), "in a batch script"),
        (lambda: train_script(LaunchConfig(), EIGHT, Path("/run"), " ", []), "none is empty"),
    ):
        with pytest.raises(UserError, match=says):
            wrong()
