"""A timed step: it trains as windlass does, its variants are what they say, and it steps down where memory ends."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import step
import torch
from step import Setup, Step, judged, measure_setup, one_rank
from variants import masked_attention

from windlass.model.attention.attend import attend
from windlass.model.attention.layout import AttentionLayout

CPU = torch.device("cpu")
SETUP = Setup("tiny", 32, 4, 2, compile=False)
BEGINNING = {"loss": "dense", "kernel": "foreach", "attention": "masked"}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def losses(setup, count=3):
    context = step.masked(setup.sequence_length, CPU) if setup.attention == "masked" else step.contextlib.nullcontext()
    with one_rank(CPU), context:
        made = Step(setup, setup.architecture(), CPU)
        return [float(made.run()) for _ in range(count)]


def test_every_rung_trains_the_same_thing():
    plain = losses(SETUP)
    assert plain[0] == pytest.approx(6.2, abs=0.1) and plain[2] < plain[0]  # ln 500, and falling
    for change in (BEGINNING, {"recompute": "full"}, {"micro_batch": 4}):
        assert losses(replace(SETUP, **change)) == pytest.approx(plain, rel=3e-3), change


def test_a_row_has_every_figure_and_no_mfu_for_an_unknown_device():
    found = measure_setup(SETUP, CPU, 0.05)
    assert found["steps"] >= step.MIN_STEPS and found["tokens_per_s"] == pytest.approx(
        128e3 / found["step_ms"], rel=0.01
    )
    assert found["attention_kernel"] == "flash for CPU" and found["setup"]["micro_batch"] == 2
    for key in (
        "mfu_causal",
        "mfu_palm",
        "mfu_six_n",
        "floor_practical_tokens_per_s",
        "over_practical",
        "allocated_gib",
    ):
        assert found[key] is None
    assert "mark" not in found and found["loss"][1] < found["loss"][0]


def test_mfu_in_three_conventions_beside_the_floor(monkeypatch):
    monkeypatch.setattr(step.torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    setup = Setup("smollm3-3b", 8192, 8, 4)
    found = judged(setup, setup.architecture(), 26_116.0, torch.device("cuda"))
    assert found["mfu_causal"] == pytest.approx(0.583, abs=1e-3)
    assert found["mfu_palm"] == pytest.approx(26116 * 25.70e9 / 989.4e12, abs=1e-3)
    assert found["mfu_six_n"] == pytest.approx(26116 * 18.45e9 / 989.4e12, abs=1e-3)
    assert found["over_practical"] == pytest.approx(0.01, abs=0.01) and "mark" not in found
    assert "measuring error" in judged(setup, setup.architecture(), 35_000.0, torch.device("cuda"))["mark"]


def test_steps_on_a_gpu_are_timed_between_their_ends(monkeypatch):
    """The CUDA branch on a fake clock: a step takes 50 ms on the device and returns to the host at once."""
    clock = SimpleNamespace(now=0.0)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.now

        def elapsed_time(self, other):
            return other.at - self.at

    def run(self):
        clock.now += 50.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Step, "run", run)
    made = Step.__new__(Step)
    made._device = torch.device("cuda")
    assert made.timed(0.5) == pytest.approx([0.05] * 10)
    assert made.host_s < 0.01 and clock.now == 50.0 * (10 + step.WARM_UP_STEPS)


def test_a_loss_that_is_no_number_is_no_figure(monkeypatch):
    monkeypatch.setattr(Step, "run", lambda self: torch.tensor(float("nan")))
    with pytest.raises(ValueError, match="the loss is nan"):
        measure_setup(SETUP, CPU, 0.01)


def test_the_dense_mask_hides_what_causal_attention_hides():
    q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
    found = masked_attention(8, CPU)(q, k, v, AttentionLayout())
    assert (found - attend(q, k, v, AttentionLayout())).abs().max() < 1e-5
