"""A signal before the first step. In whole commands: tests/cli/test_launch.py, test_signal_fuzz.py and test_signalled.py."""

import signal

import pytest

from windlass.errors import Interrupted
from windlass.signals import catch_signals
from windlass.training import interruptible as page
from windlass.training.interruptible import interruptible


@pytest.mark.parametrize(("steps", "code"), [([], 130), ([3], 75)])
def test_a_signal_ends_it_with_what_the_checkpoints_say(tmp_path, monkeypatch, steps, code):
    asked = []
    monkeypatch.setattr(page, "committed_steps", lambda place: asked.append(place) or steps)
    with catch_signals(), pytest.raises(Interrupted) as caught, interruptible(tmp_path):
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("the signal ends it")
    assert caught.value.code == code and asked == [tmp_path / "checkpoints"]


def test_without_a_handler_of_ours_a_ctrl_c_is_the_same(tmp_path):
    with pytest.raises(Interrupted) as caught, interruptible(tmp_path):
        raise KeyboardInterrupt
    assert caught.value.code == 130
