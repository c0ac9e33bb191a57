"""What a script brings of its own: a sink and a listener that raise, a schedule that gives no rate, parts on two ranks."""

import pytest

from tests import tiny
from windlass.errors import UserError
from windlass.training.loop import train


class Broken:
    """A sink, and a listener, that raise."""

    def numbers(self, step, time_s, values):
        raise OSError("no network")

    def flush(self):
        pass

    def close(self):
        pass


def test_a_sink_and_a_listener_that_raise_end_no_run(base, capsys):
    seen = []

    def listen(event):
        seen.append(event["kind"])
        event.clear()
        raise KeyError("mine")

    config = tiny.recipe(base, "broken parts", run={"steps": 2})
    assert train(config, sinks=[Broken()], on_event=listen).step == 2
    printed = capsys.readouterr().out
    assert "metrics are not sent to Broken: OSError: no network" in printed
    assert "on_event raised KeyError: 'mine'; the run goes on, and it is not called again" in printed
    assert seen == ["start"] and [line["kind"] for line in tiny.lines(config.run.directory)][-1] == "end"


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), "fast", None])
def test_a_schedule_that_gives_no_rate_is_refused(base, rate):
    def mine(_step, _total):
        return rate

    with pytest.raises(UserError, match=r"the schedule mine gives .* after 0 of 2 steps"):
        train(tiny.recipe(base, f"rate {rate}", run={"steps": 2}), schedule=mine)


def halved(step, total):
    return 1e-3 / (step + 1)


class Marked:
    """A source that counts its batches."""

    def __init__(self, stream):
        self._stream, self.read = stream, 0

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def next(self):
        self.read += 1
        return self._stream.next()


def train_with_own_parts(config):
    made = []

    def source(stream):
        made.append(Marked(stream))
        return made[0]

    train(config, source=source, schedule=halved)
    return made[0].read


def test_own_parts_on_two_ranks(base, ranks):
    config = tiny.recipe(base, "own parts", run={"steps": 3})
    assert ranks.run(2, train_with_own_parts, config) == [3, 3]
    steps = [line for line in tiny.lines(config.run.directory) if line["kind"] == "step"]
    assert [line["learning_rate"] for line in steps] == [1e-3, 5e-4, 1e-3 / 3]
