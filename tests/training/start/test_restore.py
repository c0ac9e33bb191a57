"""Where a run begins: drift is named before step 1, start_from is never a silent fresh start."""

import shutil

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import tiny
from windlass.checkpoint.keep import Difference, diff
from windlass.errors import BadCheckpoint, UserError
from windlass.training.preflight import prepare_only

SHORT = {"steps": 4}


@pytest.fixture(scope="module")
def done(base, ranks):
    """A finished run of 4 steps."""
    config = tiny.recipe(base, "done", run=SHORT)
    ranks.run(1, tiny.train, config)
    return config.run.directory


@pytest.fixture
def copy(done, tmp_path):
    """A copy of the finished run, to be continued."""
    return shutil.copytree(done, tmp_path / "copy")


def refusal(ranks, config):
    """What training says when it refuses."""
    (said,) = ranks.run(1, tiny.refusal, config)
    return said


def again(base, directory, **sections):
    run = {**SHORT, "directory": str(directory), **sections.pop("run", {})}
    return tiny.recipe(base, run=run, **sections)


def test_more_steps_go_on_and_say_what_happens_to_the_learning_rate(base, ranks, copy):
    ranks.run(1, tiny.train, again(base, copy, run={"steps": 6}))
    said = (copy / "logs" / "rank-0.log").read_text()
    assert "drift: run.steps 4 in the checkpoint, 6 now: the cosine schedule is stretched" in said
    assert "the learning rate of step 5 becomes" in said
    assert ("resume", 4) in tiny.kinds(copy) and max(tiny.losses(copy)) == 6


def test_fewer_steps_are_refused_until_accepted_and_never_below_what_is_done(base, ranks, copy):
    ranks.run(1, tiny.train, again(base, copy, run={"steps": 8}, checkpoint={"every_steps": 5, "keep_last": 10}))
    shutil.rmtree(copy / "checkpoints" / "step-00000008")
    assert "run.steps=6, and the checkpoint has done 5 of 8" in refusal(ranks, again(base, copy, run={"steps": 6}))
    accepted = {"steps": 6, "accept_drift": ["run.steps"]}
    ranks.run(1, tiny.train, again(base, copy, run=accepted))
    assert max(tiny.losses(copy)) == 6
    assert "the checkpoint has done 6 of 6" in refusal(ranks, again(base, copy, run={**accepted, "steps": 5}))


@pytest.mark.parametrize(
    ("section", "key", "value", "then"),
    [
        ("optim", "learning_rate", 1e-3, "0.003"),
        ("optim", "kernel", "foreach", "fused"),
        ("run", "seed", 9, "4"),
        ("run", "tokens_per_step", 256, "128"),
        ("precision", "policy", "bf16", "fp32"),
    ],
)
def test_drift_is_named_and_refused(base, ranks, copy, section, key, value, then):
    config = again(
        base, copy, **{section: {key: value}, "run": {"steps": 6, **({key: value} if section == "run" else {})}}
    )
    said = refusal(ranks, config)
    assert f"UserError: {section}.{key}: {then} in the checkpoint, {value} now" in said
    assert f"run.accept_drift=[{section}.{key}]" in said
    assert max(tiny.losses(copy)) == 4, "nothing was trained"


def test_a_mistyped_path_is_no_drift(base, ranks, copy):
    """The absent file is named, with what is near it; a source that is gone though the checkpoint names it is not."""
    near = base / "corpas"
    sources = [{"path": str(near)}]
    said = refusal(ranks, again(base, copy, data={"sources": sources}))
    assert said.startswith(f"AbsentSource: `path: {near}` matches no file") and "accept_drift" not in said
    assert f"did you mean `{base / 'corpus'}`?" in said
    said = refusal(ranks, again(base, copy, data={"validation": {"path": str(base / "corpus" / "0000.txt")}}))
    assert said.startswith(f"AbsentSource: `path: {base / 'corpus' / '0000.txt'}` matches no file")
    config = again(base, copy, optim={"learning_rate": 1e-3})
    (base / "corpus").rename(base / "away")
    try:
        said = refusal(ranks, config)
    finally:
        (base / "away").rename(base / "corpus")
    assert said.startswith("UserError: optim.learning_rate: 0.003 in the checkpoint, 0.001 now")


def test_a_run_keeps_its_model_whatever_is_accepted(base, ranks, copy):
    run = {"steps": 6, "accept_drift": ["model.rope_theta", "model.hidden_size"]}
    for key, value in (("hidden_size", 48), ("rope_theta", 500.0)):
        said = refusal(ranks, again(base, copy, run=run, model={key: value}))
        assert f"model.{key}" in said and "a run keeps its model" in said


def test_accepted_drift_is_reported_and_used(base, ranks, copy):
    run = {"steps": 6, "accept_drift": ["optim.learning_rate"]}
    ranks.run(1, tiny.train, again(base, copy, run=run, optim={"learning_rate": 1e-3}))
    assert (
        "accepted drift: optim.learning_rate: 0.003 in the checkpoint, 0.001 now"
        in (copy / "logs" / "rank-0.log").read_text()
    )
    from windlass.report.events import read_events

    rates = [line["learning_rate"] for line in read_events(copy / "events.jsonl") if line["kind"] == "step"]
    assert rates[-1] <= 1e-3, "a checkpoint's own optimizer settings do not win over the recipe"


def test_fp16_begins_and_ends_in_a_run_where_that_is_accepted(base, ranks, copy):
    """Its loss scale is in no checkpoint of another policy, and has no place in a run of one."""
    for steps, policy in ((6, "fp16"), (8, "bf16")):
        run = {"steps": steps, "accept_drift": ["precision.policy"]}
        ranks.run(2, tiny.train, again(base, copy, run=run, precision={"policy": policy}, parallel={"shard": 2}))
        index = (copy / "checkpoints" / f"step-{steps:08}" / "index.json").read_text()
        assert ("program.scale" in index) == (policy == "fp16")
    assert max(tiny.losses(copy)) == 8


@pytest.mark.parametrize(
    ("precision", "now"), [({"policy": "bf16-pure"}, "bf16 and bf16"), ({"states": "bf16"}, "fp32 and bf16")]
)
def test_what_weights_and_moments_are_stored_in_cannot_be_accepted(base, ranks, copy, precision, now):
    run = {"steps": 6, "accept_drift": [f"precision.{key}" for key in precision]}
    for given in ({"steps": 6}, run):
        said = refusal(ranks, again(base, copy, run=given, precision=precision))
        assert f"precision: weights in fp32 and moments in fp32 in the checkpoint, {now} now" in said
        assert "keeps its optimizer's state" in said and "accept_drift" not in said
    assert max(tiny.losses(copy)) == 4, "nothing was trained"


def test_layout_and_micro_batch_may_change_without_a_word(base, ranks, copy):
    config = again(base, copy, run={"steps": 5, "micro_batch": 4}, parallel={"zero": 0})
    ranks.run(2, tiny.train, config)
    assert max(tiny.losses(copy)) == 5


def test_a_new_run_starts_with_the_weights_of_another(base, ranks, done, tmp_path):
    config = tiny.recipe(
        base,
        run={**SHORT, "steps": 1, "directory": str(tmp_path / "new"), "start_from": str(done), "seed": 99},
        checkpoint={"keep_steps": [0]},
        optim={"learning_rate": 1e-5, "warmup_steps": 0},
    )
    ranks.run(1, tiny.train, config)
    kept = diff(tmp_path / "new" / "checkpoints" / "step-00000000", done / "checkpoints" / "step-00000004")
    assert kept.bytes and all(name.startswith("optimizer.") for name in kept.bytes), "weights are equal, states fresh"
    assert ("start", 0) in tiny.kinds(tmp_path / "new")


def test_start_what_all_goes_on_where_the_other_run_stood(base, ranks, tmp_path):
    flat = {"schedule": "constant"}  # the rate of a step does not depend on the run's length
    straight = tiny.recipe(base, "straight", run={"steps": 7}, optim=flat)
    ranks.run(1, tiny.train, straight)
    source = straight.run.directory / "checkpoints" / "step-00000003"
    run = {"steps": 7, "start_from": str(source), "start_what": "all", "directory": str(tmp_path / "fork")}
    ranks.run(1, tiny.train, tiny.recipe(base, run=run, optim=flat))
    assert tiny.kinds(tmp_path / "fork")[0] == ("resume", 3)
    assert sorted(tiny.losses(tmp_path / "fork")) == [4, 5, 6, 7]
    ends = [path / "checkpoints" / "step-00000007" for path in (tmp_path / "fork", straight.run.directory)]
    difference = diff(*ends)
    assert difference == Difference(same=difference.same)


@pytest.mark.parametrize("what", ["weights", "all"])
def test_a_wrong_start_from_is_an_error_and_no_fresh_start(base, ranks, tmp_path, what):
    (tmp_path / "empty").mkdir()
    for source in ("empty", "missing"):
        run = {**SHORT, "start_from": str(tmp_path / source), "start_what": what, "directory": str(tmp_path / "new")}
        said = refusal(ranks, tiny.recipe(base, run=run))
        assert "a checkpoint is read from a run directory with committed checkpoints" in said
        assert not (tmp_path / "new" / "events.jsonl").exists()


def test_when_every_checkpoint_is_bad_the_run_does_not_start_over(base, ranks, copy):
    for directory in (copy / "checkpoints").iterdir():
        (directory / "trainer_state.json").write_bytes(b"{}")
    said = refusal(ranks, again(base, copy, run={"steps": 6}))
    assert BadCheckpoint.__name__ in said and "not started over silently" in said
    assert UserError is not BadCheckpoint


def test_weights_of_another_place_are_not_needed_to_resume(base, ranks, done, tmp_path):
    from windlass.commands.models.export import export

    source = export(done, tmp_path / "weights").directory
    sections = {"model": {"from": str(source), "family": None, **dict.fromkeys(tiny.QWEN3_KEYS)}, "run": SHORT}
    config = tiny.recipe(base, "from", **sections)
    ranks.run(1, tiny.train, config)
    shutil.rmtree(source)
    ranks.run(1, tiny.train, again(base, config.run.directory, model=sections["model"], run={"steps": 6}))
    assert max(tiny.losses(config.run.directory)) == 6


def test_other_files_behind_the_same_recipe_are_refused_and_nothing_is_replaced(ranks, tmp_path):
    config = tiny.recipe(tmp_path, run=SHORT)
    ranks.run(1, tiny.train, config)
    before = (tmp_path / "data" / "prepared.json").read_text()
    (tmp_path / "corpus" / "new.txt").write_text("words that were not there, and change the tokenizer " * 40)
    longer = tiny.recipe(tmp_path, run={"steps": 6})
    said = refusal(ranks, longer)
    assert "are not those that the run's checkpoint has read" in said and "run.accept_drift=[data]" in said
    with pytest.raises(UserError, match="are not those that the run's checkpoint has read"):
        prepare_only(longer)
    length, rate = {"steps": None, "tokens": 300, "seed": 9}, {"learning_rate": 1e-3}
    mistakes, *said = refusal(ranks, tiny.recipe(tmp_path, run=length, optim=rate)).splitlines()
    assert mistakes == "SeveralErrors: 3 mistakes" and [line.split(":")[0].strip() for line in said] == [
        "run.seed",
        "run.steps=3, and the checkpoint has done 4 of 4",
        "the files of data.sources, the tokenizer's, or settings of data that make samples of them, are not those that the "
        f"run's checkpoint has read ({tmp_path / 'data'})",
    ]
    assert "; optim.learning_rate: 0.003 in the checkpoint, 0.001 now: " in said[0]
    assert (tmp_path / "data" / "prepared.json").read_text() == before
    assert max(tiny.losses(config.run.directory)) == 4
    grown = tiny.recipe(
        tmp_path,
        run={"steps": 6, "accept_drift": ["data", "data.tokenizer.train"]},
        data={"tokenizer": {"train": 340}, "directory": str(tmp_path / "other")},
    )
    assert "a tokenizer of 340 entries for a checkpoint of 300" in refusal(ranks, grown)
    accepted = tiny.recipe(tmp_path, run={"steps": 6, "accept_drift": ["data"]})
    ranks.run(1, tiny.train, accepted)
    assert max(tiny.losses(config.run.directory)) == 6
    log = (config.run.directory / "logs" / "rank-0.log").read_text()
    assert "accepted drift: data: other documents or another tokenizer than the checkpoint's" in log


def test_a_run_whose_steps_are_links_goes_on_from_them(base, ranks, copy, tmp_path):
    (tmp_path / "bulk").mkdir()
    for step in (3, 4):
        name = f"step-{step:08d}"
        (copy / "checkpoints" / name).rename(tmp_path / "bulk" / name)
        (copy / "checkpoints" / name).symlink_to(tmp_path / "bulk" / name)
    assert ranks.run(1, tiny.train, again(base, copy, run={"steps": 6}))[0]["step"] == 6
    assert ("resume", 4) in tiny.kinds(copy) and ("checkpoint", 6) in tiny.kinds(copy)


class Zeros(TorchDispatchMode):
    """Elements of the tensors that are made of zeros."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.zeros_like, torch.ops.aten.zeros, torch.ops.aten.zero_):
            self.elements += result.numel()
        return result


def zeros_of(config):
    """On one rank: elements of zeros that assembling a run makes, of its parameters, and of their moments."""
    from windlass.runtime import start_runtime
    from windlass.training.assemble import assemble

    zeros = Zeros()
    with start_runtime() as runtime, zeros, assemble(config, runtime, is_prepared=False) as run:
        moments = [state for name, state in run.optimizer.state_tensors().items() if not name.endswith(".step")]
        parameters = sum(record.tensor.numel() for record in run.program.records())
        return zeros.elements, parameters, sum(moment.numel() for moment in moments)


@pytest.mark.parametrize(
    ("states", "optim"),
    [({}, {}), ({"policy": "bf16", "states": "bf16"}, {}), ({}, {"kind": "muon"})],
    ids=["fused", "elementwise", "muon"],
)
def test_a_restore_makes_no_zeros_that_it_would_overwrite(base, ranks, states, optim):
    name = f"zeros-{len(states)}-{len(optim)}"
    config = tiny.recipe(base, name, run={"steps": 2}, precision=states, optim=optim)
    ((new, parameters, kept),) = ranks.run(1, zeros_of, config)
    assert new >= kept > parameters and (kept == 2 * parameters) == (not optim), "the states of a new run"
    ranks.run(1, tiny.train, config)
    longer = tiny.recipe(base, name, run={"steps": 4}, precision=states, optim=optim)
    ((resumed, *_),) = ranks.run(1, zeros_of, longer)
    assert resumed == new - kept
