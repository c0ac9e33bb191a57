"""One world of two ranks, whoever starts it: srun, mpirun, torchrun, or a script that exports the names."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from scripts.slurm_cluster import missing, slurm_cluster
from tests import tiny
from windlass.checkpoint.commit import committed_steps
from windlass.config import to_yaml
from windlass.status import read_status
from windlass.supervise.heartbeat import read_beats

pytestmark = pytest.mark.long
LIMIT_S = 1800  # more than a process that lives takes on any machine
WINDLASS = [sys.executable, "-m", "windlass"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def environment(**more):
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WINDLASS_LAUNCHER")
    kept = {name: value for name, value in os.environ.items() if name not in launchers}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def train(base, command, name, *overrides, **more):
    """Trains the tiny recipe under `command` -> the process, finished."""
    arguments = [*command, *WINDLASS, "train", str(base / "tiny.yaml"), f"run.directory={base / name}", *overrides]
    return subprocess.run(arguments, env=environment(**more), capture_output=True, text=True, timeout=LIMIT_S)


def start(command, **more):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment(**more), text=True, **pipes)


def wait(is_so):
    """Until it is so, or a test is stuck."""
    end_s = time.monotonic() + LIMIT_S
    while not is_so() and time.monotonic() < end_s:
        time.sleep(0.05)


def losses(directory):
    return [
        (line["step"], line["loss"], line["gradient_norm"]) for line in tiny.lines(directory) if line["kind"] == "step"
    ]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launchers")
    (folder / "tiny.yaml").write_text(to_yaml(tiny.recipe(folder)))
    done = train(folder, [], "ours", "--nproc", "2")
    assert done.returncode == 0, done.stderr
    return folder


def assert_same_run(base, name, done, by):
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stdout.count(f"2 ranks, started by {by}") == 1
    assert len(losses(base / name)) == tiny.STEPS and losses(base / name) == losses(base / "ours")


def test_srun(base):
    if why := missing():
        pytest.skip(why)
    with slurm_cluster() as found:
        done = train(base, ["srun", "-n", "2"], "srun", **found.environment)
    assert_same_run(base, "srun", done, "srun (SLURM_PROCID, SLURM_STEP_NUM_TASKS); they meet at ")


@pytest.mark.parametrize(
    ("program", "options", "more", "by"),
    [
        ("mpirun.openmpi", ["--oversubscribe"], {}, "Open MPI's mpirun"),
        ("mpirun.mpich", [], {"MASTER_PORT": "23571"}, "Hydra's mpirun"),
    ],
)
def test_mpirun(base, program, options, more, by):
    if shutil.which(program) is None:
        pytest.skip(f"{program} not installed (apt-get install openmpi-bin mpich)")
    done = train(base, [program, *options, "-n", "2"], program, **AS_ROOT, **more)
    assert_same_run(base, program, done, by)


def test_torchrun(base):
    arguments = [*TORCHRUN, "-m", "windlass", "train", str(base / "tiny.yaml"), f"run.directory={base / 'torchrun'}"]
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert_same_run(base, "torchrun", done, "torchrun; they meet at ")


def test_a_script_that_exports_the_names_as_accelerate_does(base):
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23572"}
    arguments = [*WINDLASS, "train", str(base / "tiny.yaml"), f"run.directory={base / 'exported'}"]
    ranks = [
        subprocess.Popen(
            arguments,
            env=environment(RANK=rank, LOCAL_RANK=rank, **names),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    out = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], out
    assert (
        out[0][0].count("2 ranks, started by a launcher that exports RANK and WORLD_SIZE; they meet at 127.0.0.1:23572")
        == 1
    )
    assert losses(base / "exported") == losses(base / "ours")


TRAINS_AGAIN = """
import os, signal, sys
from windlass import Stopped, load_recipe, train

recipe = load_recipe(sys.argv[1], f"run.directory={sys.argv[2]}")
def stop(line):
    if line["kind"] == "step" and line["step"] == 2:
        os.kill(os.getpid(), signal.SIGUSR1)
try:
    train(recipe, on_event=stop, raise_on_stop=True)
except Stopped as stopped:
    print(f"rank {os.environ['RANK']}: {stopped}", flush=True)
    assert train(recipe).step > 3
train(load_recipe(sys.argv[1], f"run.directory={sys.argv[2]}-again"))
"""


def assert_trained_again(base, name, out):
    assert out.count("was stopped after step 3") == 2, out
    for directory in (base / name, base / f"{name}-again"):
        assert losses(directory) == losses(base / "ours")


@pytest.mark.parametrize("more", [[], ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]])
def test_a_script_trains_again_in_the_same_processes_of_torchrun(base, more):
    (base / "again.py").write_text(TRAINS_AGAIN)
    name = f"again-{len(more)}"
    arguments = [*TORCHRUN, *more, str(base / "again.py"), str(base / "tiny.yaml"), str(base / name)]
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert_trained_again(base, name, done.stdout)


def test_a_script_trains_again_where_rank_0_serves_the_store(base):
    (base / "again.py").write_text(TRAINS_AGAIN)
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23573"}
    command = [sys.executable, str(base / "again.py"), str(base / "tiny.yaml"), str(base / "again")]
    ranks = [start(command, RANK=rank, LOCAL_RANK=rank, **names) for rank in "01"]
    out = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], out
    assert_trained_again(base, "again", out[0][0] + out[1][0])


TRAINS_AFTER_A_MISTAKE = """
import os, sys
from pathlib import Path
from windlass import UserError, load_recipe, train

directory = sys.argv[2]
try:
    wrong = ("data.sources=[{path: nowhere.txt}]", f"data.directory={directory}-data")
    train(load_recipe(sys.argv[1], f"run.directory={directory}-wrong", *wrong))
except UserError as error:
    Path(directory + "-rank-" + os.environ["RANK"]).write_text(f"{error.code} {error.elsewhere} {error.given}")
    train(load_recipe(sys.argv[1], f"run.directory={directory}"))
"""


def test_a_script_catches_on_all_ranks_a_mistake_that_rank_0_finds_and_trains_another_run(base):
    (base / "after.py").write_text(TRAINS_AFTER_A_MISTAKE)
    command = [*TORCHRUN, str(base / "after.py"), str(base / "tiny.yaml"), str(base / "after")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, (done.stdout, done.stderr)
    found = [(base / f"after-rank-{rank}").read_text().split(" ", 2) for rank in "01"]
    assert [where for _, where, _ in found] == ["False", "True"]
    assert {code for code, _, _ in found} == {"2"} and "nowhere.txt" in found[0][2] and found[0][2] == found[1][2]
    assert losses(base / "after") == losses(base / "ours")


FAILS_ON_ONE = """
import os, sys
from windlass import UserError, load_recipe, train

class Failing:
    def __init__(self, source):
        self.source, self.taken = source, 0
    def __getattr__(self, name):
        return getattr(self.source, name)
    def next(self, *given):
        self.taken += 1
        if self.taken == 3 and os.environ["RANK"] == "1":
            raise UserError("a row", "a rule", "a change")
        return self.source.next(*given)

train(load_recipe(sys.argv[1], f"run.directory={sys.argv[2]}"), source=Failing)
"""


def test_a_mistake_of_one_rank_alone_is_what_the_status_says(base):
    """Rank 0 fails too: the other end of its collective is gone."""
    (base / "fails.py").write_text(FAILS_ON_ONE)
    command = [*TORCHRUN, str(base / "fails.py"), str(base / "tiny.yaml"), str(base / "fails")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode != 0 and "windlass: rank 1: a row" in done.stderr
    status = read_status(base / "fails")
    assert (status.state, status.exit_code) == ("failed", 2), done.stderr


def test_a_mistake_that_rank_0_finds_is_shown_once_and_is_the_end_of_all_ranks(base):
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23574"}
    command = [*WINDLASS, "train", str(base / "tiny.yaml"), f"run.directory={base / 'wrong'}"]
    command += ["data.sources=[{path: nowhere.txt}]", f"data.directory={base / 'wrong-data'}"]
    ranks = [start(command, RANK=rank, LOCAL_RANK=rank, **names) for rank in "01"]
    err = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], err
    assert "nowhere.txt" in err[0] and err[0].count("change: ") == 1 and "Traceback" not in err[0]
    assert err[1] == ""


def test_a_rank_that_is_killed_under_torchrun_restarts_and_the_run_goes_on(base):
    """torchrun keeps one store over its restarts: the addresses of the ranks before must not be found."""
    directory = base / "restarted"
    rendezvous = ["--max-restarts", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "windlass"]
    recipe = [
        "train",
        str(base / "tiny.yaml"),
        f"run.directory={directory}",
        "run.steps=400",
        "evaluate.every_steps=400",
    ]
    agent = start([*TORCHRUN, *rendezvous, *recipe])
    wait(lambda: committed_steps(directory / "checkpoints") or agent.poll() is not None)
    with contextlib.suppress(psutil.NoSuchProcess):
        workers = psutil.Process(agent.pid).children()
        workers[-1].send_signal(signal.SIGKILL)
    out, err = agent.communicate(timeout=LIMIT_S)
    assert agent.returncode == 0, err[-3000:]
    lines = tiny.lines(directory)
    assert any(line["kind"] == "resume" for line in lines) and lines[-1]["kind"] == "end" and lines[-1]["step"] == 400
    assert "connectFullMesh" not in out + err


STALL = ["launch.stall_s=15"]  # what a phase of a busy machine does not take, and a stopped rank does


def incidents(directory):
    with contextlib.suppress(FileNotFoundError, ValueError):
        return [line for line in tiny.lines(directory) if line["kind"] == "incident"]
    return []


def stop_rank_1(directory, has_ended):
    """SIGSTOP, once something is committed: every phase of a step has been seen by then."""
    wait(lambda: committed_steps(directory / "checkpoints") or has_ended())
    (pid,) = [beat.pid for beat in read_beats(directory) if beat.rank == 1]
    os.kill(pid, signal.SIGSTOP)


def test_a_rank_that_hangs_under_torchrun_is_named_and_the_run_goes_on(base):
    """Nobody but the process beside the ranks looks; torchrun starts again what that kills."""
    directory = base / "hung"
    lengths = ["run.steps=400", "evaluate.every_steps=400"]
    recipe = ["-m", "windlass", "train", str(base / "tiny.yaml"), f"run.directory={directory}", *lengths, *STALL]
    agent = start([*TORCHRUN, "--max-restarts", "1", *recipe])
    stop_rank_1(directory, lambda: agent.poll() is not None)
    out, err = agent.communicate(timeout=LIMIT_S)
    assert agent.returncode == 0, (out[-3000:], err[-3000:])
    (line,) = incidents(directory)
    assert (line["cause"], line["ranks"], len(line["stacks"])) == ("stalled", [1], 2) and "stopped (SIGSTOP)" in line[
        "what"
    ]
    assert err.count(f"windlass: {line['what']}") == 1
    lines = tiny.lines(directory)
    assert [one["kind"] for one in lines if one["kind"] in ("start", "resume", "end")] == ["start", "resume", "end"]
    done = train(base, [], "straight", *lengths, "--nproc", "2")
    assert done.returncode == 0 and dict(tiny.losses(directory)) == dict(tiny.losses(base / "straight"))


def test_a_rank_that_is_killed_under_mpirun_is_named(base):
    """mpirun ends the others; who died, and where in the run, it cannot say."""
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("mpirun.openmpi not installed (apt-get install openmpi-bin)")
    directory = base / "killed"
    recipe = [
        "train",
        str(base / "tiny.yaml"),
        f"run.directory={directory}",
        "run.steps=5000",
        "evaluate.every_steps=5000",
    ]
    job = start(["mpirun.openmpi", "--oversubscribe", "-n", "2", *WINDLASS, *recipe], **AS_ROOT)
    wait(lambda: committed_steps(directory / "checkpoints") or job.poll() is not None)
    time.sleep(2)  # a look each second has seen the rank
    (pid,) = [beat.pid for beat in read_beats(directory) if beat.rank == 1]
    os.kill(pid, signal.SIGKILL)
    _, err = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 128 + signal.SIGKILL and re.search(
        r"^windlass: rank 1 died in step \d+, phase \w+$", err, re.M
    ), err
    assert [(line["cause"], line["ranks"]) for line in incidents(directory)] == [("died", [1])]


def worlds(directory):
    """The ranks of each start that the run's events hold so far."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return [line["derived"]["ranks"] for line in tiny.lines(directory) if line["kind"] in ("start", "resume")]
    return []


def test_of_two_elastic_nodes_of_torchrun_one_leaves_and_the_other_trains_to_the_end(base):
    """Each rank leaves by its own signal alone: with 0 where its agent is leaving, with 75 where the agent is to start again.
    On a loaded machine the first node may begin before the second has come, which is taken in then."""
    directory = base / "elastic"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rendezvous = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    rendezvous += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf"]
    recipe = [
        "train",
        str(base / "tiny.yaml"),
        f"run.directory={directory}",
        "run.steps=400",
        "evaluate.every_steps=400",
    ]

    def node(conf):
        conf = f"last_call_timeout=30,read_timeout={LIMIT_S},{conf}"
        return start([sys.executable, "-m", "torch.distributed.run", *rendezvous, conf, "-m", "windlass", *recipe])

    stays, leaves = node("is_host=1"), node("is_host=0")  # who holds the store is not to leave
    wait(lambda: "2 on CPU" in worlds(directory) or stays.poll() is not None)
    begun = max(committed_steps(directory / "checkpoints"), default=0)
    wait(lambda: max(committed_steps(directory / "checkpoints"), default=0) > begun or stays.poll() is not None)
    leaves.send_signal(signal.SIGTERM)
    leaves.communicate(timeout=LIMIT_S)
    _, err = stays.communicate(timeout=LIMIT_S)
    assert stays.returncode == 0, err[-3000:]
    lines = tiny.lines(directory)
    assert worlds(directory)[-2:] == ["2 on CPU", "1 on CPU"], worlds(directory)
    assert (lines[-1]["kind"], lines[-1]["step"]) == ("end", 400)
    assert sorted({line["step"] for line in lines if line["kind"] == "step"}) == list(range(1, 401))
