"""What is made of a resolved recipe: one console, checks where they are asked for, and what ends a run that has drifted apart."""

import contextlib
import io
import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests import tiny
from windlass.checkpoint.commit import committed_steps
from windlass.data.prepare.prepare import prepare
from windlass.errors import BadCheckpoint, OutOfSync, exit_code_of
from windlass.optim.adamw import AdamW
from windlass.parallel.program import ShardedProgram
from windlass.runtime import start_runtime
from windlass.training.assemble import assemble
from windlass.training.loop import train
from windlass.training.saving import save_if_due
from windlass.training.start.restore import state_tensors


@pytest.fixture(scope="module")
def prepared(base):
    config = tiny.recipe(base)
    return prepare(config.data, config.evaluate.sets, log=lambda sentence: None)


def test_a_checkpoint_holds_what_makes_it_sufficient_elsewhere(run):
    newest = run / "checkpoints" / f"step-{tiny.STEPS:08d}"
    names = {path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file()}
    assert {"resolved.yaml", "provenance.json", "tokenizer/tokenizer.json", "trainer_state.json", "MANIFEST"} <= names
    provenance = json.loads((newest / "provenance.json").read_text())
    assert {"argv", "hosts", "packages", "git", "python"} <= provenance.keys()


class TerminalStream(io.StringIO):
    def isatty(self):
        return True


def test_a_sentence_of_the_checkpoints_erases_the_progress_line(base, prepared):
    """Both are printed by one console: two would not know of each other's open line."""
    config, terminal = tiny.recipe(base, "logged", report={"every_steps": 1}), TerminalStream()
    with (
        contextlib.redirect_stdout(terminal),
        start_runtime() as runtime,
        assemble(config, runtime, is_prepared=True) as run,
    ):
        run.validate(0)
        save_if_due(run, 0, is_last=True)
        run.health.add(torch.ones(()), torch.ones(()), 8)
        run.record(1, torch.ones(()), torch.ones(()), 1e-3, torch.tensor(128))
        assert "step 1/" in terminal.getvalue().rpartition("\n")[2].replace("step  1", "step 1"), "left open"
        newest = config.run.directory / "checkpoints" / "step-00000000"
        (newest / "trainer_state.json").unlink()
        with pytest.raises(BadCheckpoint):
            run.checkpoints.restore(state_tensors(run.program, run.optimizer))
        run.close(1, "finished")
    assert "\r\x1b[2Kcheckpoint refused: " in terminal.getvalue()


def give_other_rows(config):
    """Two tensor ranks; at the fourth step rank 1 is given other rows -> what that step raises."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        start_runtime() as runtime,
        assemble(config, runtime, is_prepared=True) as run,
    ):
        for step in range(4):
            batches, count = run.objective.weigh(run.source.next(), run.program)
            if step == 3 and runtime.rank == 1:
                batches[0]["input_ids"] = batches[0]["input_ids"].roll(1, 1)
            try:
                run.program.run(batches, count)
            except OutOfSync as error:
                return step, str(error)
            run.optimizer.step(torch.ones(()))


def test_a_recipe_that_asks_for_checks_is_checked(base, prepared, ranks):
    parallel = {"pp": 2, "check": True}
    for step, raised in ranks.run(2, give_other_rows, tiny.recipe(base, "checked", parallel=parallel)):
        assert step == 3 and raised.startswith("ranks 0 and 1 were given different batches at step 4")


def drift_apart(config, name="embed_tokens.weight", at=5):
    """In the update of step `at` one rank has another bit in its tensor of this name."""
    step, run, programs = AdamW.step, ShardedProgram.run, []

    def watched(self, *args):
        programs.append(self)
        return run(self, *args)

    def other(self, norm):
        step(self, norm)
        if self._num_steps == at and dist.get_rank() == 1:
            held = {f"model.{one.name}": one.tensor.data for one in programs[-1].records()}
            held |= {f"optimizer.{key}": value for key, value in self.state_tensors().items()}
            held |= {f"program.{key}": value for key, value in programs[-1].state_tensors().items()}
            (tensor,) = (value for key, value in held.items() if key.endswith(name))
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).view(-1).view(torch.int8)[-1] ^= 1

    patches = mock.patch.object(AdamW, "step", other), mock.patch.object(ShardedProgram, "run", watched)
    with patches[0], patches[1], contextlib.redirect_stdout(io.StringIO()):
        try:
            train(config)
        except OutOfSync as error:
            return exit_code_of(error), str(error)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_no_checkpoint_is_made_of_ranks_that_are_out_of_step(base, prepared, ranks, asynchronous):
    name, checkpoint = f"drifting-{asynchronous}", {"async": asynchronous}
    config = tiny.recipe(base, name, parallel={"zero": 0, "replicate": 2}, checkpoint=checkpoint)
    for code, raised in ranks.run(2, drift_apart, config):
        assert code == 5 and "embed_tokens.weight differs between ranks 0 and 1 after step 6\n" in raised
    assert committed_steps(config.run.directory / "checkpoints") == [3], "every third step, and not the sixth"
    assert [path.name for path in (config.run.directory / "checkpoints").iterdir()] == ["step-00000003"]
    assert ("incident", 6) in tiny.kinds(config.run.directory)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("optimizer.model.embed_tokens.weight.exp_avg", "fp32"),
        ("optimizer.model.embed_tokens.weight.exp_avg_sq", "fp32"),
        ("optimizer.model.embed_tokens.weight.step", "fp32"),
        ("program.scale", "fp16"),
    ],
)
def test_moments_steps_and_the_loss_scale_are_compared_too(base, prepared, ranks, tmp_path, name, policy):
    config = tiny.recipe(base, tmp_path.name, parallel={"zero": 0, "replicate": 2}, precision={"policy": policy})
    for code, raised in ranks.run(2, drift_apart, config, name, 6):
        assert code == 5 and f"{name} differs between ranks 0 and 1 after step 6\n" in raised
    assert committed_steps(config.run.directory / "checkpoints") == [3]


@pytest.mark.parametrize(
    ("layout", "name", "shared"),
    [
        ({"zero": 0, "replicate": 2}, "1.mlp.up_proj.codes", True),
        pytest.param({"tp": 2}, "1.input_layernorm.weight", True, marks=pytest.mark.long),
        pytest.param({"shard": 2}, "1.mlp.up_proj.scales", False, marks=pytest.mark.long),
    ],
)
def test_a_flipped_bit_of_the_frozen_base_ends_the_run(base, prepared, ranks, tmp_path, layout, name, shared):
    """One that several ranks hold; else nobody can see it, and no checkpoint holds it."""
    given = {"model": dict.fromkeys(tiny.MODEL) | {"from": str(tiny.write_base(tmp_path / "base"))}}
    adapter = {"kind": "lora", "rank": 2, "base": "nf4"}
    config = tiny.recipe(base, tmp_path.name, parallel=layout, adapter=adapter, **given)
    for found in ranks.run(2, drift_apart, config, name):
        if not shared:
            assert found is None
            continue
        code, raised = found
        assert code == 5 and f"{name} differs between ranks 0 and 1 after step 6\n" in raised
