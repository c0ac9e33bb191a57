"""The agreement of all ranks on the step they stop after."""

import os
import random
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.hall.test_runtime import CPU, runtime_over
from windlass.ranks.stopping import OneStepAhead, Stop
from windlass.runtime import Runtime
from windlass.signals import SIGNALS, Signals, catch_signals


def alone():
    return Runtime(0, 1, CPU, dist.HashStore(), None, None)


def stop_of(runtime, caught, hold=None):
    return Stop(runtime.tree, runtime.store, runtime.device, caught, hold)


def steps_until_stop(path, signals, trials, runs_ahead=False):
    """Runs `trials` loops of 8 steps; in trial t, rank r signals itself in step signals[t][r] (0: never), before or after
    the step's collective. -> the step after which this rank stopped, per trial (8: it ran to the end). `runs_ahead`: as on a GPU,
    a step's collective is waited for one step later."""
    rank, stopped = dist.get_rank(), []
    draw = random.Random(rank)
    for trial in range(trials):
        with catch_signals() as caught:
            begun = []
            hold = (lambda begun=begun: len(begun) < 2 or begun[-2].wait()) if runs_ahead else None
            stop = stop_of(runtime_over(f"{path}-{trial}"), caught, hold)
            for step in range(1, 9):
                is_early = draw.random() < 0.5
                if signals[trial][rank] == step and is_early:
                    os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(draw.random() * 2e-3)
                begun.append(dist.all_reduce(torch.ones(()), async_op=True))
                if not runs_ahead:
                    begun[-1].wait()
                time.sleep(draw.random() * 2e-3)
                if signals[trial][rank] == step and not is_early:
                    os.kill(os.getpid(), signal.SIGTERM)
                if stop.after(step):
                    break
            begun[-1].wait()
            stopped.append(step)
    return stopped


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_are_signalled_in_different_steps_stop_after_the_same(ranks, tmp_path, world, runs_ahead):
    draw = random.Random(world)
    signals = [[3] + [0] * (world - 1), [0] * (world - 1) + [3], [0] * world, [5] * world, [8] + [0] * (world - 1)]
    signals += [[draw.randint(0, 7) for _ in range(world)] for _ in range(35)]
    results = ranks.run(world, steps_until_stop, str(tmp_path / "store"), signals, len(signals), runs_ahead)
    for trial, asked in enumerate(signals):
        first = min((step for step in asked if step), default=8)
        # a rank that is a step ahead of the first may write its own step before it
        allowed = {min(step + 1 + runs_ahead, 8) for step in asked if first <= step <= first + runs_ahead} or {8}
        (stopped,) = {result[trial] for result in results}
        assert stopped in allowed, (trial, asked)


def test_on_a_gpu_the_host_is_held_to_one_step_ahead(monkeypatch):
    events = [SimpleNamespace(synchronize=lambda number=number: waited.append(number)) for number in range(3)]
    waited, recorded = [], iter(events)
    stream = SimpleNamespace(record_event=lambda: next(recorded))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    hold = OneStepAhead()
    seen = []
    for _ in events:
        hold()
        seen.append(list(waited))
    assert seen == [[], [0], [0, 1]]
    runtime = alone()
    held = [Stop(runtime.tree, runtime.store, torch.device(kind), Signals())._hold for kind in ("cuda", "cpu")]
    assert type(held[0]) is OneStepAhead and held[1] is None


@pytest.mark.parametrize("number", SIGNALS)
def test_one_process_stops_at_once(number):
    with catch_signals() as caught:
        stop = stop_of(alone(), caught)
        assert not stop.after(1) and not stop.is_signalled
        os.kill(os.getpid(), number)
        assert stop.after(2) and stop.is_signalled
        assert stop.signal() == number.name


def name_of_signal(path):
    """Rank 1 is sent SIGUSR1 -> what each rank says stopped the run."""
    with catch_signals() as caught:
        stop, step = stop_of(runtime_over(path), caught), 1
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        while not stop.after(step):
            dist.all_reduce(torch.ones(()))
            step += 1
        return stop.signal()


def test_every_rank_names_the_signal_that_one_received(ranks, tmp_path):
    assert ranks.run(2, name_of_signal, str(tmp_path / "store")) == ["SIGUSR1", "SIGUSR1"]


def test_a_signal_before_the_first_step_stops_after_it():
    with catch_signals() as caught:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop_of(alone(), caught).after(1)
