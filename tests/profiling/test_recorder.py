"""Steps that a rank records where somebody asks: which, into which files, and what was sent over which axis."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from windlass.parallel.config import MeshLayout
from windlass.parallel.mesh import make_mesh
from windlass.profiling.recorder import StepRecorder, profile_directory
from windlass.profiling.summary import summarize

CPU = torch.device("cpu")


class Requests:
    """Asked for `steps` steps, once `after` questions were answered with no."""

    def __init__(self, steps, after=0):
        self.steps, self.after, self.answers = steps, after, 0

    def profile_asked(self):
        self.after -= 1
        return self.steps if self.after < 0 and not self.answers else 0

    def profile_answered(self):
        self.answers += 1


class Log:
    def __init__(self):
        self.paused, self.events = [], []

    def pause(self, cause):
        self.paused.append(cause)
        return contextlib.nullcontext()

    def event(self, kind, step, **fields):
        self.events.append((kind, step, fields))


def test_the_steps_asked_for_are_recorded_whole_and_no_others(tmp_path):
    requests, log = Requests(2, after=3), Log()
    recorder = StepRecorder(tmp_path, 0, CPU, {}, requests, log)
    for step in range(5, 12):
        recorder.between_steps(step)
        for _ in range(step):
            torch.ones(4, 4).sigmoid()
    directory = profile_directory(tmp_path, 8, 0)
    assert directory == tmp_path / "profiles" / "step-00000008-rank-0"
    assert sorted(file.name for file in directory.iterdir()) == ["collectives.json", "facts.json", "trace.json.gz"]
    assert log.events == [("profile", 10, {"steps": [9, 10], "directory": str(directory)})]
    assert (requests.answers, log.paused) == (1, ["profile", "profile"])
    found = summarize(directory)
    assert (found.first_step, found.last_step, found.device) == (9, 10, "CPU")
    assert {row.name: row.calls for row in found.operators}["aten::sigmoid"] == (8 + 9) / 2
    assert not any(path.name.startswith(".") for path in (tmp_path / "profiles").iterdir()), "no draft is left"


def test_a_run_that_ends_writes_the_steps_that_it_had(tmp_path):
    requests, log = Requests(50), Log()
    recorder = StepRecorder(tmp_path, 0, CPU, {}, requests, log)
    for step in range(3):
        recorder.between_steps(step)
        torch.ones(2, 2).exp()
    recorder.finish(3)
    recorder.finish(3)
    found = summarize(profile_directory(tmp_path, 0, 0))
    assert (found.first_step, found.last_step, requests.answers, len(log.events)) == (1, 3, 1, 1)
    assert {row.name: row.calls for row in found.operators}["aten::exp"] == 1


def test_a_profile_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    (tmp_path / "profiles").write_text("a file where the folder should be")
    requests, log = Requests(1), Log()
    recorder = StepRecorder(tmp_path, 0, CPU, {}, requests, log)
    recorder.between_steps(0)
    recorder.between_steps(1)
    assert (requests.answers, log.events) == (1, []), "whoever waits is answered"
    assert "the profile of steps 1 to 1 is not written" in capsys.readouterr().out


def sent_by_axis(base):
    """On two ranks: two steps with collectives of known sizes -> (axis, kind, calls, bytes) and seconds of each."""
    mesh = make_mesh(MeshLayout(1, 1, 2, 1, 1, 1), "cpu")
    rank, loss, fsdp = dist.get_rank(), mesh.loss_group, mesh.dense["fsdp"].get_group()
    requests = Requests(2)
    recorder = StepRecorder(Path(base), rank, CPU, mesh.axes_of_groups(), requests, Log())
    dist.all_reduce(torch.ones(99), group=loss)  # before: not of the profile
    for step in range(4):
        recorder.between_steps(step)
        dist.all_gather_into_tensor(torch.empty(20), torch.ones(10), group=fsdp)
        for _ in range(3):
            dist.all_reduce(torch.ones(7, dtype=torch.bfloat16), group=loss)
        dist.all_reduce(torch.tensor(1, dtype=torch.int64), group=loss)
    found = summarize(profile_directory(Path(base), 0, rank))
    assert json.loads((profile_directory(Path(base), 0, rank) / "facts.json").read_text())["rank"] == rank
    return [(row.axis, row.kind, row.calls, row.bytes) for row in found.traffic], [row.seconds for row in found.traffic]


def test_what_was_sent_is_counted_by_axis_in_calls_and_bytes_per_step(ranks, tmp_path):
    for rows, seconds in ranks.run(2, sent_by_axis, str(tmp_path)):
        assert sorted(rows) == [("fsdp", "all-gather", 1.0, 80.0), ("loss", "all-reduce", 4.0, 3 * 14 + 8)]
        assert all(took > 0 for took in seconds), "each was found in the trace"


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        (MeshLayout(1, 1, 1, 1, 1, 1), []),
        (MeshLayout(1, 1, 2, 1, 1, 1), ["fsdp", "loss"]),
        (MeshLayout(1, 2, 1, 1, 1, 1), ["loss", "replicate"]),
        (MeshLayout(1, 1, 1, 2, 1, 1), ["context", "fsdp", "loss"]),
        (MeshLayout(2, 1, 1, 1, 1, 1), ["pp"]),
        (MeshLayout(1, 1, 1, 1, 2, 1), ["tp"]),
    ],
)
def test_every_group_that_sends_is_named_by_its_axis(ranks, layout, axes):
    for found in ranks.run(layout.world, names_of_groups, layout):
        assert sorted(axis for name in found for axis in name.split(", ")) == axes


def names_of_groups(layout):
    return list(make_mesh(layout, "cpu").axes_of_groups().values())


def test_the_second_step_is_counted_once_and_what_is_logged_is_not_in_it(tmp_path):
    log = Log()
    recorder = StepRecorder(tmp_path, 0, CPU, {}, Requests(0, after=99), log, counted=6)
    for step in range(4, 8):
        recorder.between_steps(step)
        for _ in range(step):
            torch.ones(2).sum().item()
        recorder.after_update(step + 1)
        torch.ones(2).sum().item()
    ((kind, step, fields),) = log.events
    assert (kind, step, fields["reads"], log.paused) == ("counts", 6, 5, ["profile", "profile"])


def test_a_run_that_ends_inside_the_counted_step_leaves_no_profiler_on(tmp_path):
    recorder = StepRecorder(tmp_path, 0, CPU, {}, Requests(0, after=99), Log(), counted=1)
    recorder.between_steps(0)
    assert torch.autograd._profiler_enabled()
    recorder.close()
    recorder.close()
    assert not torch.autograd._profiler_enabled()
