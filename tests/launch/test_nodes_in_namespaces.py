"""`windlass launch nodes` on three hosts, as network namespaces: killed, signalled, cut off, and back."""

import contextlib
import random
import shutil
import subprocess
import sys
import time

import psutil
import pytest

from tests import tiny
from tests.hosts import agent_of, hosts, missing, shell_of
from windlass.config import to_yaml
from windlass.errors import EXIT_STOPPED
from windlass.status import is_locked, read_status

pytestmark = [pytest.mark.long, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
LIMIT_S = 1800  # more than a process that lives takes on any machine
BATCH = 12  # sequences of a step: for one, two and three ranks
WINDLASS = [sys.executable, "-m", "windlass"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    settings = {"checkpoint": {"every_steps": 10, "keep_last": 3}, "evaluate": {"every_steps": 5000}}
    (folder / "tiny.yaml").write_text(to_yaml(tiny.recipe(folder, run={"tokens_per_step": 16 * BATCH}, **settings)))
    return folder


class Cluster:
    """Three hosts that start one command. `of`: its first process on each."""

    def __init__(self, found, base, name, nodes, steps, *overrides):
        self.hosts, self.run, self._out = found, base / name, lambda host: base / f"{name}.{host.name}.txt"
        meet = ["--nodes", nodes, "--endpoint", "host0:29400"]
        self.command = [*WINDLASS, "launch", "nodes", str(base / "tiny.yaml"), *meet]
        self.command += [f"run.directory={self.run}", f"run.steps={steps}", *overrides]
        self.of = {}
        for number in range(3):
            self.start(number)

    def start(self, number):
        host = self.hosts[number]
        self.of[number] = host.start(self.command, self._out(host), OMP_NUM_THREADS="1")

    def lines(self, *kinds):
        with contextlib.suppress(FileNotFoundError, ValueError):
            return [line for line in tiny.lines(self.run) if line["kind"] in kinds]
        return []

    def until(self, is_so):
        end_s = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < end_s, self.text()
            time.sleep(0.1)

    def until_trained(self, starts, ranks):
        """Waits for the `starts`-th start, on `ranks` ranks, to take a few steps."""
        self.until(lambda: len(self.lines("start", "resume")) >= starts)
        assert self.ranks()[starts - 1 :] == [f"{ranks} on CPU"], self.text()
        self.until(lambda: [line["kind"] for line in self.lines("start", "resume", "step")][-3:] == ["step"] * 3)

    def until_committed(self, starts, step):
        """Waits for the `starts`-th start to commit a step behind `step` -> the last one that is committed."""
        self.until(lambda: len(self.lines("start", "resume")) == starts)
        self.until(lambda: any(line["step"] > step for line in self.lines("checkpoint")))
        return self.lines("checkpoint")[-1]["step"]

    def ranks(self):
        return [line["derived"]["ranks"] for line in self.lines("start", "resume")]

    def codes(self):
        self.until(lambda: all(process.poll() is not None for process in self.of.values()))
        return [self.of[number].returncode for number in range(3)]

    def text(self, number=None):
        hosts = self.hosts if number is None else [self.hosts[number]]
        return "\n".join(self._out(host).read_text()[-3000:] for host in hosts)


@pytest.fixture
def cluster(base):
    with contextlib.ExitStack() as opened:
        yield lambda *arguments: Cluster(opened.enter_context(hosts(3)), base, *arguments)


def losses(directory):
    """By step; of steps that were done twice, the last."""
    found = [line for line in tiny.lines(directory) if line["kind"] == "step"]
    return {line["step"]: (line["loss"], line["gradient_norm"]) for line in found}


def assert_consumed_in_order(run):
    """`windlass data consumed` proves it; steps go on exactly where a checkpoint was."""
    done = subprocess.run([*WINDLASS, "data", "consumed", str(run)], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    for line in tiny.lines(run):
        if line["kind"] in ("start", "resume"):
            assert line["data"]["samples_consumed"] == BATCH * line["step"]


def one_host(base, steps=60):
    """The run directory of undisturbed steps on three ranks of one host."""
    run = base / f"one-{steps}"
    if not run.exists():
        one = [*WINDLASS, "train", str(base / "tiny.yaml"), "--nproc", "3", f"run.directory={run}"]
        done = subprocess.run([*one, f"run.steps={steps}"], capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
    return run


def test_a_host_is_killed_among_three_and_the_end_is_that_of_one_host(base, cluster):
    world = cluster("killed", "3", 60)
    world.until(lambda: any(line["step"] > 20 for line in world.lines("step")))
    shell_of(world.of[2]).kill()
    world.of[2].wait()
    world.start(2)
    assert world.codes() == [0, 0, 0], world.text()
    assert world.ranks() == ["3 on CPU", "3 on CPU"], "the first restart works"
    assert [line["restart"] for line in world.lines("incident")] == [1], "one of two agents writes it down"
    assert losses(world.run) == losses(one_host(base)) and len(losses(world.run)) == 60
    assert_consumed_in_order(world.run)


def test_a_host_leaves_and_comes_back_and_a_signal_to_all_stops_the_run(cluster):
    world = cluster("leaves", "2:3", 5000)
    world.until_trained(1, 3)
    agent_of(world.of[2]).terminate()
    assert world.of[2].wait() == EXIT_STOPPED
    world.until_trained(2, 2)
    world.start(2)
    world.until_trained(3, 3)
    for process in world.of.values():
        agent_of(process).terminate()
    assert world.codes() == [EXIT_STOPPED] * 3, world.text()
    status = read_status(world.run)
    assert (status.state, status.exit_code) == ("stopped", EXIT_STOPPED)
    ends = [line["step"] for line in world.lines("end")]
    begins = [line["step"] for line in world.lines("start", "resume")]
    assert begins == [0, *ends[:2]] and not world.lines("incident"), "no step is lost, and none failed"
    assert_consumed_in_order(world.run)


def test_a_host_that_is_cut_off_never_trains_alone_and_dead_launchers_leave_nothing(cluster):
    world = cluster("cut", "2:3", 5000)
    world.until(lambda: any(line["step"] > 20 for line in world.lines("step")))
    world.hosts[2].link("down")
    world.until_trained(2, 2)
    world.hosts[2].link("up")
    world.until_trained(3, 3)
    assert world.ranks() == ["3 on CPU", "2 on CPU", "3 on CPU"]
    assert [line["restart"] for line in world.lines("incident")] == [1], "the way back is no failure"
    agents = [agent_of(process) for process in world.of.values()]
    ranks = [child for agent in agents for child in agent.children()]
    for agent in agents:
        agent.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert len(ranks) == 3 and not alive and not is_locked(world.run)
    world.codes()
    world.command[-1] = f"run.steps={max(line['step'] for line in world.lines('step')) + 20}"
    world.command.append("run.accept_drift=[run.steps]")
    for number in range(3):
        world.start(number)
    assert world.codes() == [0, 0, 0], world.text()
    assert read_status(world.run).state == "finished"
    assert_consumed_in_order(world.run)


def test_a_rank_that_stalls_is_named_on_all_hosts_and_the_end_is_that_of_one_host(base, cluster):
    """Rank 1 is stopped; the ranks of the other hosts wait for it, and are late as well."""
    world = cluster("stalls", "3", 60, "launch.stall_s=5")
    world.until(lambda: any(line["step"] > 20 for line in world.lines("step")))
    (rank,) = agent_of(world.of[1]).children()
    rank.suspend()
    assert world.codes() == [0, 0, 0], world.text()
    (incident,) = world.lines("incident")
    assert (incident["cause"], incident["ranks"], incident["restart"]) == ("stalled", [1], 1)
    assert incident["what"].startswith("rank 1 on host1 stalls in step ") and "stopped (SIGSTOP)" in incident["what"]
    assert [(one["rank"], one["host"]) for one in incident["stacks"]] == [(0, "host0"), (1, "host1"), (2, "host2")]
    for host in world.hosts:
        assert (base / f"stalls.{host.name}.txt").read_text().count(incident["what"]) == 1, "each names the same rank"
    assert losses(world.run) == losses(one_host(base)) and len(losses(world.run)) == 60


def test_the_host_of_the_endpoint_is_killed_and_the_same_command_goes_on(base, cluster):
    world = cluster("endpoint", "3", 60)
    world.until(lambda: any(line["step"] > 20 for line in world.lines("step")))
    shell_of(world.of[0]).kill()
    world.of[0].wait()
    world.until(lambda: all("is lost; waiting for its host" in world.text(number) for number in (1, 2)))
    assert [world.of[number].poll() for number in (1, 2)] == [None, None] and not is_locked(world.run)
    world.start(0)
    assert world.codes() == [0, 0, 0], world.text()
    assert world.ranks() == ["3 on CPU", "3 on CPU"], "the first restart works"
    assert losses(world.run) == losses(one_host(base)) and len(losses(world.run)) == 60
    assert_consumed_in_order(world.run)


def test_ten_times_a_host_leaves_dies_or_is_cut_off_and_comes_back(cluster):
    world = cluster("ten-rounds", "2:3", 100_000, "launch.max_restarts=20")
    draw = random.Random(13)
    for turn in range(10):
        world.until_trained(2 * turn + 1, 3)
        number, what = draw.choice([1, 2]), ("leaves", "dies", "is cut off")[turn % 3]
        if what == "leaves":
            agent_of(world.of[number]).terminate()
        elif what == "dies":
            shell_of(world.of[number]).kill()
        else:
            world.hosts[number].link("down")
        world.until_trained(2 * turn + 2, 2)
        if what == "is cut off":
            world.hosts[number].link("up")
        else:
            world.of[number].wait()
            world.start(number)
    world.until_trained(21, 3)
    for process in world.of.values():
        agent_of(process).terminate()
    assert world.codes() == [EXIT_STOPPED] * 3, world.text()
    assert world.ranks() == [f"{ranks} on CPU" for ranks in [3, 2] * 10 + [3]]
    assert_consumed_in_order(world.run)


def test_fifty_times_a_rank_or_its_whole_host_is_killed_and_the_end_is_that_of_one_host(base, cluster):
    """Each time once a further step is committed. The first restart works fifty times of fifty: each kill is one more start, from
    the last committed step or a later one."""
    kills, steps = 50, 1600
    world = cluster("fifty", "3", steps, f"launch.max_restarts={kills}")
    draw, committed = random.Random(50), []
    for turn in range(kills):
        committed.append(world.until_committed(turn + 1, committed[-1] if committed else 0))
        number = draw.choice([1, 2])
        if turn % 2:
            shell_of(world.of[number]).kill()
            world.of[number].wait()
            world.start(number)
        else:
            (rank,) = agent_of(world.of[number]).children()
            rank.kill()
    assert world.codes() == [0, 0, 0], world.text()
    starts = [line["step"] for line in world.lines("start", "resume")]
    assert world.ranks() == ["3 on CPU"] * (kills + 1), "fifty first restarts"
    assert all(begin >= step for begin, step in zip(starts[1:], committed, strict=True)), "nothing committed is lost"
    assert len(world.lines("incident")) == kills, "one of the agents that live writes it down"
    assert losses(world.run) == losses(one_host(base, steps)) and len(losses(world.run)) == steps
    assert_consumed_in_order(world.run)


@pytest.mark.skipif(shutil.which("tc") is None, reason="tc not installed (apt-get install iproute2)")
def test_a_host_behind_a_slow_link_is_named_before_step_1(base):
    """20 Mbit/s of one host among three, in both directions: a three-hundredth of the others. Up to three runs, since on
    a busy machine the others may be held up in the few milliseconds that they need."""
    said = []
    for name in ("slow", "slow again", "slow at last"):
        with hosts(3) as found:
            found[1].shape("20mbit")
            cluster = Cluster(found, base, name, "3:3", 4)
            assert cluster.codes() == [0, 0, 0], cluster.text()
        printed = (base / f"{name}.host0.txt").read_text() + (base / name / "logs" / "rank-0.log").read_text()
        assert "all-reduce of 3 ranks" in printed
        said += [line for line in printed.splitlines() if "the network of host" in line]
        if said:
            break
    assert said and all("the network of host1 is slow" in line for line in said), cluster.text()
