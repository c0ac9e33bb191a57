"""Runs under a SLURM of our own, two nodes on this host: every way in which a job loses its nodes, and what becomes of the run.

Wherever a segment ends, the next one begins at the checkpoint that it left, and the whole equals a run that nobody disturbed."""

import json
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from scripts.slurm_cluster import missing, slurm_cluster
from tests import tiny
from tests.launch.test_launchers import WINDLASS, environment, losses
from windlass.checkpoint.commit import committed_steps
from windlass.config import to_yaml

pytestmark = pytest.mark.long
LIMIT_S = 1800  # more than a process that lives takes on any machine
STEPS = 400
NO_HOST = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}  # n0 and n1 are names without an address


@pytest.fixture(scope="module")
def slurm():
    if why := missing():
        pytest.skip(why)
    with slurm_cluster(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The recipe, in a folder whose name a shell and SLURM could misread, beside an undisturbed run on two ranks."""
    folder = tmp_path_factory.mktemp("slurm") / "50%j of a"
    folder.mkdir()
    config = tiny.recipe(
        folder,
        "ours",
        run={"steps": STEPS},
        checkpoint={"every_steps": 10, "keep_last": 100},
        evaluate={"every_steps": STEPS},
        launch={"slurm": {"environment": NO_HOST}},
    )
    (folder / "tiny.yaml").write_text(to_yaml(config))
    done = subprocess.run(
        [*WINDLASS, "train", "tiny.yaml", "--nproc", "2"], cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


class Job:
    """A run that was submitted as `name` under `base`."""

    def __init__(self, slurm, base, name, *arguments):
        self.slurm, self.env, self.run = slurm, environment(**slurm.environment), base / name
        recipe = ["tiny.yaml", f"run.directory={base / name}"]
        submit = [*WINDLASS, "launch", "slurm", *recipe, "--nodes", "2", "--tasks-per-node", "1", *arguments]
        self.submitted = self.do(*submit, cwd=base)
        self.id = re.search(r"job (\d+): trains", self.submitted)[1]

    def do(self, *command, cwd=None):
        done = subprocess.run(command, env=self.env, cwd=cwd, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def facts(self):
        return dict(re.findall(r"(\w+)=(\S+)", self.do("scontrol", "show", "job", self.id)))

    def newest(self):
        return max(committed_steps(self.run / "checkpoints"), default=0)

    def output(self):
        file = self.run / "slurm" / f"{self.id}.out"
        return file.read_text() if file.exists() else ""

    def wait(self, is_there):
        end_s = time.monotonic() + LIMIT_S
        while not is_there():
            assert time.monotonic() < end_s, (self.facts(), self.output())
            time.sleep(0.1)

    def trains(self, segment):
        """Waits until this segment has saved something."""
        began = re.compile(rf"^segment {segment} on .* begins at (?:step-)?(\w+)$", re.M)
        self.wait(lambda: began.search(self.output()))
        at = began.search(self.output())[1]
        self.wait(lambda: self.newest() > (0 if at == "none" else int(at)))

    def ends(self):
        """-> the last state, exit code and restarts, as SLURM has them; others, like SIGNALING, pass."""
        found = {}

        def is_over():
            found.update(self.facts())
            return found["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")

        self.wait(is_over)
        return [found[name] for name in ("JobState", "ExitCode", "Restarts")]

    def segments(self):
        """Of each segment: where it began, and how it ended: (exit code, newest checkpoint), None where its shell was killed."""
        found = []
        for line in self.output().splitlines():
            if match := re.fullmatch(r"segment \d+ on .* begins at (\S+)", line):
                found.append([match[1], None])
            elif match := re.fullmatch(r"segment \d+ ends with (\d+) at (\S+)", line):
                found[-1][1] = (int(match[1]), match[2])
        return found

    def resumes(self):
        return [f"step-{line['step']:08d}" for line in tiny.lines(self.run) if line["kind"] == "resume"]

    def ranks(self, node):
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ()
            except psutil.Error:
                continue
            is_here = (mine.get("SLURM_JOB_ID"), mine.get("SLURMD_NODENAME")) == (self.id, node)
            if is_here and mine.get("SLURM_CONF") == self.env["SLURM_CONF"] and "SLURM_PROCID" in mine:
                found += [process] if "windlass" in process.cmdline() else []
        return found


def site(**settings):
    return [f"launch.slurm.{key}={json.dumps(value)}" for key, value in settings.items()]


def assert_equal_to_the_undisturbed_run(job, base):
    began = [begin for begin, _ in job.segments()]
    assert job.resumes() == began[1:] and began[0] == "none"
    kept = tiny.losses(job.run)
    assert len(kept) == STEPS and kept == tiny.losses(base / "ours")
    newest = [str(base / name / "checkpoints" / f"step-{STEPS:08d}") for name in ("ours", job.run.name)]
    assert "equal" in job.do(*WINDLASS, "checkpoint", "diff", *newest)


def test_data_is_prepared_by_a_job_before(slurm, base):
    job = Job(slurm, base, "plain", "run.steps=12", f"data.directory={base / 'other'}", "optim.warmup_steps=2")
    prepared = re.search(r"job (\d+): prepares", job.submitted)[1]
    assert job.ends() == ["COMPLETED", "0:0", "0"], job.output()
    assert "train: 52 documents" in (job.run / "slurm" / f"{prepared}.out").read_text()
    assert job.segments() == [["none", (0, "step-00000012")]] and len(losses(job.run)) == 12
    assert "MASTER_ADDR=127.0.0.1\n" in job.output()  # what ranks are given of the network is in the log


def test_data_is_prepared_by_an_array_of_parts(slurm, base):
    data = f"data.directory={base / 'of-parts'}"
    job = Job(slurm, base, "parts", "run.steps=4", data, "optim.warmup_steps=2", "launch.slurm.prepare_parts=3")
    jobs = re.findall(r"^job (\d+): ", job.submitted, re.M)
    assert job.ends() == ["COMPLETED", "0:0", "0"], job.output()
    said = "".join(file.read_text() for file in (job.run / "slurm").glob("*.out"))
    assert len(jobs) == 4 and all(f"part {number}/3" in said for number in range(3))
    assert "train: 52 documents" in (job.run / "slurm" / f"{jobs[2]}.out").read_text()
    assert "prepared already and unchanged" in job.do(*WINDLASS, "prepare", "tiny.yaml", data, cwd=base)
    one, three = (base / name / "train" / "index.json" for name in ("data", "of-parts"))
    assert one.read_bytes() == three.read_bytes()


def test_a_run_of_eight_segments(slurm, base):
    """Requeued by hand, held and released, warned of its time limit, and a rank killed: each once or more."""
    job = Job(slurm, base, "eight")
    for number, act in enumerate(["requeue", "requeuehold", "USR1", "kill", "USR1", "USR1", "USR1"]):
        job.trains(number)
        if act == "USR1":
            job.do("scancel", "--signal=USR1", job.id)
        elif act == "kill":
            (rank,) = job.ranks("n1")
            rank.send_signal(signal.SIGKILL)
        else:
            job.do("scontrol", act, job.id)
        if act == "requeuehold":
            job.wait(lambda: job.facts()["Reason"].startswith(("JobHeld", "job_requeued_in_held_state")))
            job.do("scontrol", "release", job.id)
    assert job.ends() == ["COMPLETED", "0:0", "7"], job.output()
    ends = [end for _, end in job.segments()]
    assert [code for code, _ in ends] == [75, 75, 75, 137, 75, 75, 75, 0]
    assert [begin for begin, _ in job.segments()[1:]] == [newest for _, newest in ends[:-1]]
    assert_equal_to_the_undisturbed_run(job, base)


def test_a_rank_that_hangs_is_named_and_the_job_goes_on(slurm, base):
    """The process beside the ranks names it and kills them; the job goes back to the queue, and on from its last checkpoint."""
    job = Job(slurm, base, "hung", "launch.stall_s=15")
    job.trains(0)
    (rank,) = job.ranks("n1")
    rank.suspend()
    assert job.ends() == ["COMPLETED", "0:0", "1"], job.output()
    assert [code for _, (code, _) in job.segments()] == [137, 0]
    (line,) = [line for line in tiny.lines(job.run) if line["kind"] == "incident"]
    assert (line["cause"], line["ranks"]) == ("stalled", [1]) and "stopped (SIGSTOP)" in line["what"]
    said = "".join(file.read_text() for file in (job.run / "slurm").glob(f"{job.id}-*.log"))
    assert said.count(f"windlass: {line['what']}") == 1
    assert_equal_to_the_undisturbed_run(job, base)


def test_six_time_limits(slurm, base):
    """A run that is far too long for its limit goes on from where USR1 stopped it, each time. USR1 comes 15 to 45 s after a
    start, a minute later for each 30 s that one takes here; then the ranks have an hour, so that a loaded machine loses none.
    Segments that it meets before their first commit count for nothing."""
    first = next(line for line in tiny.lines(base / "ours") if line["kind"] == "step")
    start_s = int(first["time"] - (base / "corpus").stat().st_mtime)
    limit = f"1:{2 + start_s // 30:02}:00"
    endless = ["run.steps=100000", "checkpoint.every_steps=100000", "evaluate.every_steps=100000"]
    settings = ["--time", limit, "launch.slurm.grace_s=3675", "launch.max_restarts=100", "optim.warmup_steps=2"]
    job = Job(slurm, base, "limits", *settings, *endless)
    job.wait(lambda: int(job.facts()["Restarts"]) >= 6 and len(job.resumes()) >= 6)
    job.do("scancel", job.id)
    assert job.ends()[0] == "CANCELLED"
    ended = [end for _, end in job.segments()[:-1]]  # six with a save, or more: the next limit may come before scancel
    saved = [newest for code, newest in ended if code == 75]
    assert {end for end in ended if end[0] != 75} <= {(130, "none")} and len(saved) >= 6, ended
    assert saved == [begin for begin, _ in job.segments() if begin != "none"]
    assert (resumes := job.resumes()) == saved[: len(resumes)]
    steps = [0, *(int(newest.removeprefix("step-")) for newest in saved)]
    assert sorted(set(steps)) == steps


def test_a_job_that_is_preempted_goes_on_afterwards(slurm, base):
    job = Job(slurm, base, "preempted")
    job.trains(0)
    script = ["sbatch", "--parsable", "-p", "high", "-N", "2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3"]
    high = job.do(*script).strip()
    assert job.ends() == ["COMPLETED", "0:0", "1"], job.output()
    assert "JobState=COMPLETED" in job.do("scontrol", "show", "job", high)
    (_, (code, _)), (_, last) = job.segments()
    assert code == 75 and last == (0, f"step-{STEPS:08d}")
    assert_equal_to_the_undisturbed_run(job, base)


@pytest.mark.parametrize("node", ["n1", "n0"])  # n0 has the batch script too
def test_a_run_goes_on_after_a_node_is_lost(slurm, base, node):
    job = Job(slurm, base, f"lost-{node}")
    job.trains(0)
    slurm.kill_node(node)
    job.wait(lambda: "down" in job.do("sinfo", "-h", "-n", node, "-o", "%T"))
    slurm.start_node(node)
    state, code, restarts = job.ends()
    assert (state, code) == ("COMPLETED", "0:0") and int(restarts) >= 1, job.output()
    assert job.segments()[-1][1] == (0, f"step-{STEPS:08d}")
    assert_equal_to_the_undisturbed_run(job, base)


def test_a_signal_waits_for_a_rank_that_has_just_begun(slurm, base):
    """It would kill a container, or a Python, that starts; held back, it ends the segment before its first step."""
    settings = site(container="bash -c 'sleep 3; exec \"$@\"' --", python=sys.executable)
    job = Job(slurm, base, "early", *settings, "run.steps=12", "optim.warmup_steps=2")
    job.wait(lambda: job.ranks("n0") and job.ranks("n1"))
    job.do("scancel", "--signal=USR1", job.id)
    assert job.ends() == ["COMPLETED", "0:0", "1"], job.output()
    assert job.segments() == [["none", (130, "none")], ["none", (0, "step-00000012")]]
    assert "interrupted before the first step" in "".join(log.read_text() for log in (job.run / "slurm").glob("*.log"))


def test_a_mistake_of_the_user_fails_and_is_not_tried_again(slurm, base):
    recipe = base / "tiny.yaml"
    right = recipe.read_text()
    job = Job(slurm, base, "wrong", "launch.slurm.options=[--hold]")
    recipe.write_text(right + "\nreprot: {}\n")
    try:
        job.do("scontrol", "release", job.id)
        assert job.ends() == ["FAILED", "2:0", "0"]
    finally:
        recipe.write_text(right)
    assert job.segments() == [["none", (2, "none")]] and "did you mean `report`?" in job.output()


def test_a_job_that_gains_nothing_ends(slurm, base):
    """Every rank fails at once, in a container of a kind; each is given two cores."""
    settings = site(container="bash -c 'echo rank of $SLURM_CPUS_PER_TASK; exit 5' --", cpus_per_task=2)
    job = Job(slurm, base, "stuck", "launch.max_restarts=1", *settings)
    assert job.ends() == ["FAILED", "5:0", "1"], job.output()
    assert job.segments() == [["none", (5, "none")]] * 2
    assert job.output().count("rank of 2\n") == 4  # two ranks, two segments: the end of the logs is there
    assert job.output().endswith("2 segments without a new checkpoint: the job ends with 5\n")


def test_a_cancelled_job_saves_and_ends(slurm, base):
    job = Job(slurm, base, "cancelled")
    job.trains(0)
    job.do("scancel", job.id)
    state, _, restarts = job.ends()
    ((_, (code, newest)),) = job.segments()
    assert (state, restarts, code) == ("CANCELLED", "0", 75)
    assert newest == f"step-{tiny.lines(job.run)[-1]['step']:08d}"
