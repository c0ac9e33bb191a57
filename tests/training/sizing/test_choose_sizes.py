"""Sizes by what fits: chosen by the count and by trials, recorded, kept by a resume, and without a trace in what is trained."""

import contextlib
import io
from dataclasses import replace

import pytest
import torch
import yaml

from tests import tiny
from tests.training.runs.resuming import assert_every_byte, checkpoint
from windlass.checkpoint.commit import committed_steps
from windlass.errors import UserError
from windlass.runtime import start_runtime
from windlass.training import assemble as page
from windlass.training.assemble import assemble
from windlass.training.loop import train
from windlass.training.parts.device_memory import Room
from windlass.training.parts.own_parts import OwnParts
from windlass.training.sizing import choose_sizes as choices
from windlass.training.start.drift import newest_trainer_state

GIB = 1 << 30


class Device:
    """A device on which trials of more than `most` sequences run out of memory, on the ranks of `on` (None: all)."""

    def __init__(self, most, on=None, limit_bytes=GIB):
        self.most, self.on, self.limit_bytes, self.tried = most, on, limit_bytes, []

    def room(self, runtime):
        self.rank = runtime.rank
        return Room(self.limit_bytes, self.peak)

    def peak(self, size):
        self.tried.append((size.micro_batch, size.recompute))
        if size.micro_batch > self.most and self.on in (None, self.rank):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return 0


@contextlib.contextmanager
def device(given):
    """Runs choose their sizes by it."""
    original = page.resolve_run

    def with_its_room(config, runtime, is_prepared, _find_room, opened):
        return original(config, runtime, is_prepared, given.room, opened)

    page.resolve_run = with_its_room
    try:
        yield given
    finally:
        page.resolve_run = original


def auto(base, name, micro_batch="auto", **sections):
    return tiny.recipe(base, name, **{"run": {"micro_batch": micro_batch, **sections.pop("run", {})}, **sections})


def trained(config, given):
    """On one rank: what a run on `given` printed, tried and ended with."""
    with device(given), contextlib.redirect_stdout(io.StringIO()) as said:
        result = tiny.train(config)
    return {**result, "said": said.getvalue(), "tried": given.tried, "rng": torch.get_rng_state()}


def resolved(config):
    return yaml.safe_load((config.run.directory / "resolved.yaml").read_text())


def kept(config):
    return newest_trainer_state(config.run.directory)


@pytest.fixture(scope="module")
def small(base, ranks):
    """On one process: trials of more than 2 sequences fail."""
    torch.manual_seed(7)
    config = auto(base, "sizes-small")
    (found,) = ranks.run(1, trained, config, Device(2))
    return config, found


def test_trials_go_down_from_the_best_and_the_first_that_fits_is_taken(small):
    _, found = small
    assert found["tried"] == [(m, kind) for m in (8, 4) for kind in ("none", "selective")] + [(2, "none")]
    assert "auto: run.micro_batch=2, parallel.recompute=none, parallel.compile=false: " in found["said"]
    assert "of 12 sizes 0 were not tried by their count, and 4 ran out of memory" in found["said"]


def test_what_was_chosen_is_in_resolved_yaml_and_in_every_checkpoint(small):
    config, _ = small
    for tree in (resolved(config), kept(config)["config"]):
        assert tree["run"]["micro_batch"] == 2
        assert (tree["parallel"]["recompute"], tree["parallel"]["compile"]) == ("none", False)
    assert "micro_batch: auto" in (config.run.directory / "recipe.yaml").read_text()
    assert kept(config)["device"] == "CPU"


def test_a_run_after_trials_is_bit_for_bit_a_run_without(base, small, ranks):
    """Losses, norms, rows read; checkpoints hold the same tensors; the generator is where it was."""
    config, found = small
    plain = auto(base, "sizes-given", 2, parallel={"recompute": "none", "compile": False})
    (other,) = ranks.run(1, trained, plain, Device(2))
    assert other["tried"] == []
    assert found["rows"] == other["rows"] and torch.equal(found["rng"], other["rng"])
    assert tiny.losses(config.run.directory) == tiny.losses(plain.run.directory)
    for step in committed_steps(config.run.directory / "checkpoints"):
        assert_every_byte(*(checkpoint(run.run.directory, step) for run in (config, plain)), step)


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("shard", {"shard": 2}),
        pytest.param("zero1", {"shard": 2, "zero": 1}, marks=pytest.mark.long),
        pytest.param("hybrid", {"shard": 2, "replicate": 2}, marks=pytest.mark.long),
    ],
)
def test_on_several_ranks_too(base, ranks, name, parallel):
    """DTensor keeps what it finds for a mesh, and takes it for every mesh that equals it: the one of the trials must not."""
    world = 2 * parallel.get("replicate", 1)
    runs = [auto(base, f"sizes-{name}-tried", parallel=parallel)]
    chosen = ranks.run(world, trained, runs[0], Device(1))
    assert all(one["tried"] for one in chosen)
    runs.append(auto(base, f"sizes-{name}-given", 1, parallel=parallel | {"recompute": "none", "compile": False}))
    ranks.run(world, trained, runs[1], Device(1))
    assert tiny.losses(runs[0].run.directory) == tiny.losses(runs[1].run.directory)
    for step in committed_steps(runs[0].run.directory / "checkpoints"):
        assert_every_byte(*(checkpoint(run.run.directory, step) for run in runs), step)


def test_a_resume_on_the_same_devices_takes_the_choice_and_tries_nothing(base, small, ranks):
    assert resolved(small[0])["run"]["micro_batch"] == 2
    longer = auto(base, "sizes-small", run={"steps": tiny.STEPS + 2})
    (found,) = ranks.run(1, trained, longer, Device(8))
    assert found["tried"] == [] and found["step"] == tiny.STEPS + 2
    assert "run.micro_batch=2, parallel.recompute=none, parallel.compile=false: as the run began" in found["said"]
    assert resolved(longer)["run"]["micro_batch"] == 2


def test_ranks_agree_where_one_alone_runs_out_of_memory(base, ranks):
    """Rank 1 fails in the middle of a step of FSDP2: rank 0 waits for nobody, and takes what fits there."""
    config = auto(base, "sizes-two", run={"steps": 2})
    found = ranks.run(2, trained, config, Device(1, on=1))
    assert [one["tried"] for one in found] == [
        [(4, "none"), (4, "selective"), (2, "none"), (2, "selective"), (1, "none")]
    ] * 2
    assert resolved(config)["run"]["micro_batch"] == 1


def test_on_other_devices_sizes_are_chosen_anew_and_said_so(base, ranks):
    config = auto(base, "sizes-two", run={"steps": 4})
    (found,) = ranks.run(1, trained, config, Device(4))
    others = "since the checkpoint was written on 2 x CPU and this run has 1 x CPU; this changes memory and speed, not the result"
    assert found["tried"] and others in found["said"]
    assert resolved(config)["run"]["micro_batch"] == 4 and "drift: run.micro_batch" not in found["said"]


def test_a_choice_is_not_kept_where_a_setting_of_the_layout_has_changed(base, ranks):
    """At zero 3 a rank holds half of what it holds at zero 1: what fitted then is tried again."""
    began = auto(base, "sizes-cut", parallel={"zero": 3}, run={"steps": 2})
    ranks.run(2, trained, began, Device(4))
    assert resolved(began)["run"]["micro_batch"] == 4
    for zero, most, expected in ((1, 1, [4, 4, 2, 2, 1]), (1, 4, [])):
        longer = auto(base, "sizes-cut", parallel={"zero": zero}, run={"steps": 4 if expected else 6})
        found, _ = ranks.run(2, trained, longer, Device(most))
        assert [micro_batch for micro_batch, _ in found["tried"]] == expected
        assert ("since parallel.zero changed from 3 to 1;" in found["said"]) is bool(expected)
        assert resolved(longer)["run"]["micro_batch"] == 1


def test_where_nothing_fits_the_error_counts(base, ranks):
    config = auto(base, "sizes-none")
    with (
        device(Device(0)),
        pytest.raises(UserError, match=r"not even run\.micro_batch=1 with parallel\.recompute=full fits"),
    ):
        train(config)


def test_a_peak_over_the_limit_does_not_fit(base):
    """The device gave more than a step may take: such a trial has failed, too."""
    config, room = (
        auto(base, "sizes-peak", run={"steps": 2}),
        Room(GIB, lambda size: GIB + 1 if size.micro_batch > 4 else GIB),
    )
    with (
        start_runtime() as runtime,
        assemble(config, runtime, is_prepared=False, own=OwnParts(room=lambda _: room)) as run,
    ):
        assert run.config.run.micro_batch == 4


def test_what_the_count_rules_out_is_not_tried(base):
    given = Device(8, limit_bytes=1)
    with device(given), contextlib.redirect_stdout(io.StringIO()) as said:
        train(auto(base, "sizes-counted", run={"steps": 2}))
    assert given.tried == [(1, "full")] and "of 12 sizes 11 were not tried by their count" in said.getvalue()


def test_a_given_half_leaves_the_other_to_be_chosen(base):
    given = Device(2)
    with device(given):
        train(auto(base, "sizes-half", run={"steps": 2}, parallel={"recompute": "full"}))
    assert given.tried == [(8, "full"), (4, "full"), (2, "full")]


def test_on_a_cpu_auto_is_one_in_words(base):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train(auto(base, "sizes-cpu", run={"steps": 2}))
    line = "auto: run.micro_batch=1, parallel.recompute=none, parallel.compile=false: on a CPU "
    line += "the smallest micro-batch, no recomputation, not compiled\n"
    assert line in said.getvalue()


def test_a_layout_that_is_not_counted_takes_the_least(base, ranks):
    config = auto(
        base,
        "sizes-tp",
        run={"steps": 2},
        parallel={"tp": 2},
        model={"num_attention_heads": 4, "num_key_value_heads": 2},
    )
    first, _ = ranks.run(2, trained, config, Device(8))
    assert (
        first["tried"] == [] and "the smallest, since what a rank of this layout keeps is not counted" in first["said"]
    )


def test_a_global_batch_that_no_micro_batch_divides_is_refused(base):
    config = auto(base, "sizes-odd", run={"tokens_per_step": 48})
    with pytest.raises(UserError, match=r"run.tokens_per_step=48 \(3 sequences\) on 2 ranks with run.micro_batch=auto"):
        config.check_layout(None, 2)


def test_compile_is_chosen_where_the_device_can_and_the_rules_allow(base, monkeypatch):
    monkeypatch.setattr(choices, "can_compile", lambda device_type: True)
    with start_runtime() as runtime:
        for parallel, is_compiled in (
            ({}, True),
            ({"compile": False}, False),
            ({"expert": 1, "schedule": "1f1b"}, True),
        ):
            config = auto(base, "sizes-compiled", parallel=parallel)
            assert choices._compile(config, config.model.shape(300), runtime) is is_compiled
        on_gpu = replace(runtime, device=torch.device("cuda"))
        assert choices._compile(config, config.model.shape(300), on_gpu) is True
        sparse = replace(config.model.shape(300), num_experts=4, experts_per_token=2, expert_size=16)
        assert choices._compile(config, sparse, on_gpu) is True
        ways = [{"names": [f"model.layers.{n}.mlp.*"], "frozen": True} for n in range(0, 12, 2)]
        frozen = auto(base, "sizes-frozen", optim={"groups": ways}, model={"num_hidden_layers": 12})
        refused = auto(
            base, "sizes-refused", parallel={"compile": True}, optim={"groups": ways}, model={"num_hidden_layers": 12}
        )
        architecture = frozen.model.shape(300)
        monkeypatch.setattr(choices, "rules_of", refuse)
        assert choices._compile(frozen, architecture, runtime) is False and refused.parallel.compiles


def test_what_would_race_is_not_compiled_and_sized_again(base, monkeypatch):
    """The trials have compiled it; then its kernels are looked at (compiled.py)."""
    monkeypatch.setattr(choices, "can_compile", lambda device_type: True)
    asked, config = [], auto(base, "sizes-racing")
    architecture, given = config.model.shape(300), Device(8)

    def sized(config, _plan, _runtime, _room, _keys):
        asked.append(config.parallel.compiles)
        return choices.fill_open(config, micro_batch=2, recompute="none"), "tried"

    monkeypatch.setattr(choices, "_sized", sized)
    for racing, expected in ([], [True]), (["triton_red_a"], [True, False]):
        asked.clear()
        monkeypatch.setattr(choices, "racing_kernels", lambda _runtime, racing=racing: racing)
        with start_runtime() as runtime:
            open_ = choices.fill_open(config, compile=choices._compile(config, architecture, runtime))
            keys = choices._left_open(config)
            chosen, (said,) = choices._by_room(open_, None, runtime, given.room(runtime), keys)
        assert asked == expected and chosen.parallel.compiles is not bool(racing)
        assert ("; not compiled, since triton_red_a would read back" in said) is bool(racing)
        assert f"parallel.compile={str(not racing).lower()}" in said


def refuse(_config, _architecture):
    raise UserError("given", "rule", "change")
