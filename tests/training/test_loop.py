"""The loop as a user meets it: from Python in three lines, its events, and its global state."""

import os
import shutil
import signal
import sys
import threading
from contextlib import nullcontext

import pytest
import torch

from tests import tiny
from windlass.checkpoint.checkpoints import Checkpoints
from windlass.checkpoint.commit import committed_steps
from windlass.commands.data_consumed import consumed
from windlass.contract import num_ranks, rank
from windlass.errors import UserError
from windlass.signals import signals_of_process
from windlass.status import is_locked, read_status
from windlass.supervise.heartbeat import Heartbeat, LastBeat, folder_of
from windlass.training import loop


def test_a_run_is_a_few_lines_of_python(base, monkeypatch):
    from windlass import load_recipe, train
    from windlass.config import to_yaml

    monkeypatch.delenv("RANK", raising=False)
    (base / "recipe.yaml").write_text(to_yaml(tiny.recipe(base, "python")))
    recipe = load_recipe(base / "recipe.yaml", "run.steps=3")
    result = train(recipe)
    assert (result.step, result.stopped) == (3, False)
    assert (result.directory / "report.html").exists()
    assert not torch.distributed.is_initialized(), "the process is left as it was found"
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(UserError):
        train(load_recipe(base / "recipe.yaml", "run.steps=4", "optim.beta1=0.5"))  # refused once the group is there
    assert not torch.distributed.is_initialized() and signal.getsignal(signal.SIGINT) is before, "after an error too"


@pytest.fixture
def at_step(monkeypatch):
    """at_step(act, n, ...): `act()` in the clip of the n-th step from now on, over all runs."""
    from windlass.training import loop as page

    def plan(act, *numbers):
        steps = iter(range(1, 1000))

        def clip(*args, original=page.gradient_norm):
            if next(steps) in numbers:
                act()
            return original(*args)

        monkeypatch.setattr(page, "gradient_norm", clip)

    return plan


def test_a_train_that_raises_lets_go_of_everything_while_its_error_lives(base, monkeypatch, at_step):
    from windlass import train

    monkeypatch.delenv("RANK", raising=False)
    config, stdout = tiny.recipe(base, "raises"), sys.stdout
    threads = {thread.name for thread in threading.enumerate()}

    def fail():
        raise ValueError("planted")

    at_step(fail, 5, 7)
    kept = []  # the traceback holds the run
    for _ in range(2):
        with pytest.raises(ValueError, match="planted") as caught:
            train(config)
        kept.append(caught.value)
        assert sys.stdout is stdout and not torch.distributed.is_initialized() and signals_of_process() is None
        assert not is_locked(config.run.directory)
        assert not any(
            name.startswith("windlass-loader") for name in {one.name for one in threading.enumerate()} - threads
        )
    assert read_status(config.run.directory).state == "failed"
    assert train(config).step == tiny.STEPS, "the third goes on, with both errors alive"
    assert [line["step"] for line in tiny.lines(config.run.directory) if line["kind"] == "resume"] == [3, 3]


def test_a_train_that_raises_has_committed_what_it_saved_before(base, monkeypatch, at_step):
    """A save in the background is under way: the caller may end the process, or read the checkpoint, as soon as train returns."""
    from windlass import train

    monkeypatch.delenv("RANK", raising=False)
    config, may_write = tiny.recipe(base, "raises behind a save", checkpoint={"every_steps": 3}), threading.Event()
    write, wait = Checkpoints._write, Checkpoints.wait

    def late_write(*args):
        assert may_write.wait(60)
        return write(*args)

    def noted_wait(checkpoints):
        if checkpoints._pending is not None:
            may_write.set()
        wait(checkpoints)

    def fail():
        raise ValueError("planted")

    monkeypatch.setattr(Checkpoints, "_write", late_write)
    monkeypatch.setattr(Checkpoints, "wait", noted_wait)
    at_step(fail, 4)
    try:
        with pytest.raises(ValueError, match="planted"):
            train(config)
        assert committed_steps(config.run.directory / "checkpoints") == [3]
    finally:
        may_write.set()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_a_caller_that_wants_it_gets_a_stop_as_an_exception(base, monkeypatch, at_step, number):
    from windlass import Stopped, train

    monkeypatch.delenv("RANK", raising=False)
    config = tiny.recipe(base, f"stops-{number}")
    at_step(lambda: os.kill(os.getpid(), number), 4)
    with pytest.raises(Stopped) as caught:
        train(config, raise_on_stop=True)
    assert caught.value.given == f"the run in {config.run.directory} was stopped after step 4, and saved"
    assert (caught.value.code, caught.value.retry) == (75, True)
    assert train(config, raise_on_stop=True).step == tiny.STEPS


def test_a_run_names_the_batch_of_a_norm_far_above_the_usual_and_goes_on(base, monkeypatch):
    from windlass import train
    from windlass.training import loop as page

    monkeypatch.delenv("RANK", raising=False)
    norms, clip = iter(range(1, 1000)), page.gradient_norm
    monkeypatch.setattr(page, "gradient_norm", lambda *args: clip(*args) * (1e4 if next(norms) == 14 else 1))
    config = tiny.recipe(base, "spike", run={"steps": 20}, report={"every_steps": 4})
    assert train(config).step == 20
    (incident,) = [line for line in tiny.lines(config.run.directory) if line["kind"] == "incident"]
    assert incident["step"] == 14 and incident["positions"] == [13 * 8, 14 * 8], "8 sequences a step"
    assert incident["gradient_norm"] > 100 * incident["median"] and "of the 13 steps before" in incident["what"]
    list(consumed(config.run.directory, base / "list"))
    listed = [line.replace(" ", "/") for line in (base / "list").read_text().splitlines()]
    assert incident["samples"] == listed[13 * 8 : 14 * 8], "what `data consumed` says of that step"
    assert " ".join(incident["samples"]) in incident["what"]


def test_off_the_main_thread_a_run_trains_without_signals_and_says_so(base, monkeypatch, capsys):
    from windlass import train

    monkeypatch.delenv("RANK", raising=False)
    results = []
    thread = threading.Thread(target=lambda: results.append(train(tiny.recipe(base, "thread"))))
    thread.start()
    thread.join()
    assert [result.step for result in results] == [tiny.STEPS]
    assert "signals are not caught: train() does not run on the main thread" in capsys.readouterr().out


def test_every_step_line_has_the_fields_of_the_contract(run):
    lines = tiny.lines(run)
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, tiny.STEPS + 1))
    fields = (
        "loss gradient_norm learning_rate targets tokens tokens_per_s tokens_per_s_per_gpu mfu memory_bytes data_wait_s"
    )
    for line in steps:
        assert set(fields.split()) | {"kind", "time", "step"} <= line.keys()
        assert line["targets"] == 128 and line["tokens"] == 128 * line["step"] and line["mfu"] is None
    assert lines[-1]["kind"] in ("end", "sample")


def generator_untouched(config):
    from windlass.training import loop as page

    states, original = [], page.gradient_norm

    def spy(*args):
        states.append(torch.get_rng_state())
        return original(*args)

    page.gradient_norm = spy
    try:
        tiny.train(config)
    finally:
        page.gradient_norm = original
    return all(torch.equal(states[0], state) for state in states), len(states)


def test_nobody_draws_from_the_global_generator_while_training(base, ranks):
    assert ranks.run(2, generator_untouched, tiny.recipe(base, "generator")) == [(True, tiny.STEPS)] * 2


def test_a_step_without_targets_is_skipped_and_not_nan_forever(base, ranks):
    """A global count of zero is no training step: the weights stay what they were."""
    result = ranks.run(1, train_without_targets, tiny.recipe(base, "empty", run={"steps": 3}))[0]
    assert "counts no target" in result


def train_without_targets(config):
    from windlass.errors import UserError
    from windlass.objectives import pretrain as objective

    original, asked = objective.Pretrain.weigh, []

    def weigh(self, batches, program):
        asked.append(batches)
        batches, count = original(self, batches, program)
        return batches, count if len(asked) == 1 else 0 * count  # the first one is validation's

    objective.Pretrain.weigh = weigh
    try:
        tiny.train(config)
    except UserError as error:
        return str(error)
    finally:
        objective.Pretrain.weigh = original
    return "nothing was noticed"


def test_a_rank_says_where_it_is_before_it_does_it(base, monkeypatch):
    """Step and the position where its batch ends, for `windlass stacks` and the watchdog."""
    from windlass import train

    seen, order, beat = [], [], Heartbeat.beat

    def watched(self, phase, step=None, position=None):
        beat(self, phase, step, position)
        seen.append((phase, self._step, self._position))
        order.append(LastBeat(1, 0, self._step, 0, 0.0, phase).progress)

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(Heartbeat, "beat", watched)
    config = tiny.recipe(base, "beats", run={"steps": 3}, evaluate={"every_steps": 2}, checkpoint={"every_steps": 2})
    train(config)
    assert [one for one in seen if one[0] != "start"] == [
        ("evaluate", 0, 0),
        *(("data", 0, 8), ("step", 0, 8), ("update", 0, 8), ("record", 1, 8)),
        *(("data", 1, 16), ("step", 1, 16), ("update", 1, 16), ("record", 2, 16), ("evaluate", 2, 16)),
        ("checkpoint", 2, 16),
        *(
            ("data", 2, 24),
            ("step", 2, 24),
            ("update", 2, 24),
            ("record", 3, 24),
            ("evaluate", 3, 24),
            ("checkpoint", 3, 24),
            ("end", 3, 24),
        ),
    ]
    assert order == sorted(order), "the rank with the least is behind the others"
    assert not folder_of(config.run.directory).exists()


def test_a_script_under_another_launcher_knows_its_rank_before_anything_else(base, monkeypatch):
    """srun and mpirun export no RANK: each of their ranks would look after itself as rank 0."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WINDLASS_LAUNCHER"):
        monkeypatch.setenv(name, "")  # so that what is adopted is taken back
        monkeypatch.delenv(name)
    names = {"PROCID": "1", "STEP_NUM_TASKS": "2", "LOCALID": "1", "JOB_ID": "7", "STEP_NODELIST": "n0"}
    for name, value in names.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    seen = []
    monkeypatch.setattr(loop, "open_heartbeat", lambda *_: nullcontext(seen.append((rank(), num_ranks()))))
    monkeypatch.setattr(loop, "start_runtime", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.train(tiny.recipe(base, "scripted"))
    assert seen == [(1, 2)]


def test_a_resume_records_the_drift_it_accepts_and_its_table_begins_where_the_run_did(base, monkeypatch, capsys):
    from windlass import train

    monkeypatch.delenv("RANK", raising=False)
    train(tiny.recipe(base, "drifts", run={"steps": 6}))
    directory = base / "drifts"
    shutil.rmtree(directory / "checkpoints" / "step-00000006")
    changed = {"run": {"steps": 8, "accept_drift": ["optim.max_norm"]}, "optim": {"max_norm": 0.5}}
    capsys.readouterr()
    train(tiny.recipe(base, "drifts", **changed))
    lines = tiny.lines(directory)
    start, resume = (next(line for line in lines if line["kind"] == kind) for kind in ("start", "resume"))
    assert "drift" not in start
    norm, steps = resume["drift"]
    assert norm.startswith("accepted drift: optim.max_norm") and "0.5" in norm
    assert steps.startswith("drift: run.steps 6 in the checkpoint, 8 now")
    assert "accepted drift: optim.max_norm" in (directory / "report.html").read_text()
    out = capsys.readouterr().out
    assert "step 3: resume\n" in out, "the terminal has had the sentences already"
    first = next(line["loss"] for line in lines if line["kind"] == "validation")
    assert f"validation     0       {first:.4f}" in out and "validation     8 " in out


def test_a_second_run_of_a_process_is_refused_and_does_not_touch_the_first(base):
    from windlass import train

    refused = []

    def call_train():
        with pytest.raises(UserError, match="while another run of this process is under way") as caught:
            train(tiny.recipe(base, "second"))
        refused.append(caught.value)

    def on_event(line):
        if line["kind"] == "step" and line["step"] == 1:
            thread = threading.Thread(target=call_train)
            thread.start()
            thread.join()
            call_train()

    result = train(tiny.recipe(base, "first"), on_event=on_event)
    assert len(refused) == 2 and not result.stopped and not (base / "second").exists()
    assert train(tiny.recipe(base, "second")).step == result.step, "afterwards it may"
