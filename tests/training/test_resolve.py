"""A recipe resolved: its length in steps, the model it gets, and nothing left open."""

import contextlib

import pytest
from torch.nn.attention import current_flash_attention_impl

from tests import tiny
from tests.model.attention.flash_on_cpu import Kernel, flash_on_cpu
from windlass.data.prepare.prepare import prepare
from windlass.errors import UserError
from windlass.runtime import start_runtime
from windlass.status import is_locked
from windlass.training.left_open import with_steps
from windlass.training.parts.device_memory import device_room
from windlass.training.resolve import resolve_run
from windlass.training.start.model_plan import recipe_architecture


@pytest.fixture(scope="module")
def prepared(base):
    config = tiny.recipe(base)
    return prepare(config.data, config.evaluate.sets, log=lambda sentence: None)


@pytest.mark.parametrize(("length", "steps"), [({"tokens": 1281}, 11), ({"tokens": 1280}, 10), ({"epochs": 2.0}, None)])
def test_a_length_in_tokens_or_epochs_becomes_whole_steps(base, prepared, length, steps):
    resolved = with_steps(tiny.recipe(base, run={"steps": None, **length}), prepared)
    if steps is None:
        steps = -(-2 * prepared.sets["train"].samples // 8)
    assert resolved.run.steps == steps
    assert (resolved.run.tokens, resolved.run.epochs) == (None, None)


def test_epochs_are_held_against_the_warm_up_too(base, prepared):
    config = tiny.recipe(base, run={"steps": None, "epochs": 0.1}, optim={"warmup_steps": 500})
    with pytest.raises(UserError, match=r"optim.warmup_steps=500 in a run of"):
        with_steps(config, prepared)


def test_nothing_is_left_open_and_the_directory_is_locked(base, prepared):
    open_ = {"run": {"steps": None, "tokens": 1281}, "optim": {"warmup_steps": "auto"}, "precision": {"policy": "auto"}}
    config = tiny.recipe(base, "resolved", **open_)
    with start_runtime() as runtime:
        with contextlib.ExitStack() as opened:
            config, trainer_state, opened_data, plan, sentences = resolve_run(
                config, runtime, True, device_room, opened
            )
            assert is_locked(config.run.directory)
        assert not is_locked(config.run.directory)
    assert (config.run.steps, config.optim.warmup_steps, config.precision.policy) == (11, 0, "fp32")
    assert trainer_state is None and opened_data.stream == prepared.stream
    assert plan.architecture == recipe_architecture(config, prepared)
    assert any(sentence.startswith("precision.policy=auto: fp32 on ") for sentence in sentences)


def test_flash_attention_is_active_from_its_choice_to_the_end_of_the_run(base, monkeypatch):
    config = tiny.recipe(base, "flash", data={"isolate": True}, precision={"policy": "bf16"})
    page = "windlass.training.sizing.choose_flash"
    with start_runtime() as runtime, flash_on_cpu(FA3=Kernel()):
        with contextlib.ExitStack() as opened:
            resolved = resolve_run(config, runtime, False, device_room, opened)
            assert (resolved.config.run.flash_attention, current_flash_attention_impl()) == ("auto", None), "on a CPU"
        assert not any("flash" in sentence for sentence in resolved.sentences)
        monkeypatch.setattr(f"{page}.cuda_capability", lambda device: (9, 0))
        monkeypatch.setattr(f"{page}.has_package", lambda version: True)
        with contextlib.ExitStack() as opened:
            resolved = resolve_run(config, runtime, True, device_room, opened)
            assert (resolved.config.run.flash_attention, current_flash_attention_impl()) == (3, "FA3")
        assert current_flash_attention_impl() is None
    assert "run.flash_attention=auto: 3, tried on CPU" in resolved.sentences


def test_a_flash_attention_that_cannot_run_is_refused_before_data_is_prepared(base):
    config = tiny.recipe(
        base, "no-flash", run={"flash_attention": 4}, precision={"policy": "bf16"}, data={"isolate": True}
    )
    config = config.changed(data=config.data.changed(directory=str(base / "never-prepared")))
    with (
        start_runtime() as runtime,
        contextlib.ExitStack() as opened,
        pytest.raises(UserError, match="attention=4 on CPU"),
    ):
        resolve_run(config, runtime, False, device_room, opened)
    assert not (base / "never-prepared").exists() and not config.run.directory.exists()


def test_a_run_of_few_steps_says_so_before_it_starts(base, prepared):
    config = tiny.recipe(base, "few", run={"steps": None, "epochs": 0.1}, optim={"warmup_steps": 0})
    with start_runtime() as runtime, contextlib.ExitStack() as opened:
        resolved = resolve_run(config, runtime, True, device_room, opened)
    steps = resolved.config.run.steps
    assert 1 < steps < 10
    (said,) = [sentence for sentence in resolved.sentences if "run.tokens_per_step" in sentence]
    assert said.startswith(f"run.epochs=0.1 is {steps} steps here")
