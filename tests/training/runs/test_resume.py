"""A run that was stopped and started again is the run that was never stopped: bit for bit on the same layout, with the same
samples in the same order and the same losses on any other.

A row has settings (resuming.py), the layout of the run that nobody stopped, the layouts before and after, and who is killed at
which step. Where nobody is, the run goes on from a copy of the whole one's directory, without the checkpoints after step 6.
"""

import itertools
import json
import math
import random
import shutil
from dataclasses import dataclass

import pytest

from tests import tiny
from tests.training.runs.resuming import (
    BESIDE_A_BASE,
    GPT2,
    assert_close,
    assert_every_byte,
    checkpoint,
    parallel_of,
    recipe,
    train,
)
from windlass.model.architecture import parameter_shapes
from windlass.model.config import architecture_from_hf
from windlass.proof.pool import RankFailed
from windlass.report.events import read_events
from windlass.training import loop
from windlass.training.start.drift import newest_trainer_state
from windlass.training.start.open_saved import open_saved

STOPPED = 6
BF16 = 3e-3, 3e-2


@dataclass(frozen=True)
class Row:
    settings: str
    whole: str
    after: str
    before: str = ""
    """As `whole`, unless it is named."""
    kill: tuple[int, int] | None = None
    background: bool = True
    quick: bool = False
    tolerances: tuple[float, float] = (1e-5, 1e-5)
    """Of losses and norms on another layout: bf16's where ranks add up what one process has whole."""

    def __str__(self) -> str:
        how = f"killed {self.kill[0]} at {self.kill[1]}" if self.kill else "stopped"
        saving = "" if self.background else ", saved at once"
        return f"{self.settings}: {self.before or self.whole} -> {self.after}, {how}{saving}"


def killed(kernel, background, trial):
    draw = random.Random(f"{kernel}{background}{trial}")
    step, victim = draw.randint(1, tiny.STEPS), draw.randrange(2)
    quick = (kernel, background, trial) == ("foreach", False, 0)
    return Row(kernel, "shard2", "shard2", kill=(victim, step), background=background, quick=quick)


CHANGES = {  # no name, no shape and no dtype in a checkpoint depends on them
    "shard2": ["shard2 compile", "shard2 offload", "shard2 units2 prefetch1"],
    "shard2 compile": ["shard2"],
    "zero2 shard2 offload": ["shard2"],
    "zero1 shard2": ["shard2 selective budget"],
    "shard2 units2": ["zero0 replicate2 bucket1"],
}
ROWS = [
    *(killed(*cell) for cell in itertools.product(("fused", "foreach"), (True, False), (0, 1))),
    Row("fused", "shard2", "one", kill=(0, 8)),
    Row("fused", "shard2", "one", quick=True),
    Row("fused", "shard2", "shard4", kill=(0, 8)),
    Row("dropout", "shard2", "shard2", kill=(1, 5)),
    Row("dropout", "shard2", "shard2"),
    Row("dropout", "shard2", "one", kill=(0, 8)),
    Row("dropout", "shard2", "shard4", kill=(0, 8)),
    Row("dropout", "shard2", "shard4", quick=True),
    *(Row(policy, "shard2", "shard2", kill=(1, 8)) for policy in ("fp16", "bf16-pure", "bf16 states", "fp8")),
    *(Row(policy, "shard2", "shard2", quick=True) for policy in ("fp16", "bf16-pure")),
    Row("fp8", "shard2", "shard2"),
    Row("bf16", "one", "one", quick=True),
    Row("bf16", "one", "one", kill=(0, 8)),
    Row("bf16", "shard2", "one"),
    Row("bf16", "pp2", "pp2", quick=True),
    Row("bf16", "pp2", "one", tolerances=BF16),
    Row("bf16", "one", "pp2", tolerances=BF16),
    Row("fp16", "pp2", "pp2", kill=(1, 8)),
    Row("bf16 heads", "tp2", "tp2", quick=True),
    Row("bf16 heads", "tp2", "tp2", kill=(1, 8)),
    Row("bf16 heads", "tp2", "one", tolerances=BF16),
    Row("bf16 heads", "one", "tp2", tolerances=BF16),
    Row("muon and groups", "shard2", "shard2", kill=(1, 8)),
    Row("muon and groups", "shard2", "shard2", quick=True),
    Row("muon and groups", "shard2", "shard4", kill=(0, 8)),
    Row("muon and groups", "shard2", "shard4"),
    *(Row("fused", "shard2", after, before, (1, 8)) for before, changes in CHANGES.items() for after in changes),
    Row("fused", "shard2", "zero1 shard2 selective budget"),
    Row("fused", "shard2", "zero0 replicate2 bucket1", quick=True),
    Row("heads", "tp2", "shard2", kill=(0, 8)),
    Row("heads", "tp2", "tp2 shard2", "shard2", (0, 8)),
    Row("heads", "tp2", "shard2", quick=True),
    Row("documents", "context2", "one", kill=(0, 8)),
    Row("documents", "context2", "one", quick=True),
    Row("documents", "context2", "context2 tp2 ulysses", "shard2", (0, 8)),
    Row("documents", "context2", "pp2 context2 ulysses", "context4", (0, 8)),
    Row("experts", "expert2 shard2", "one", kill=(0, 8)),
    Row("experts", "expert2 shard2", "expert2 shard4", "shard2", (0, 8)),
    *(Row(kind, "shard2", "shard2", kill=(1, 8)) for kind in BESIDE_A_BASE),
    *(Row(kind, "shard2", "tp2", kill=(0, 8)) for kind in BESIDE_A_BASE),
    *(Row(kind, "zero0 replicate2", "one", "pp2", kill=(0, 8)) for kind in BESIDE_A_BASE),
    Row("deep", "pp2", "pp2"),
    Row("deep", "one", "pp2 shard2 interleaved-1f1b"),
    Row("deep", "one", "one", "pp2", (0, 8)),
    Row("deep", "one", "pp2 zbv zero0 replicate2", "pp2", (0, 8)),
    Row("deep", "pp2", "one", quick=True),
]


def stopped(row, runs, ranks, name):
    """The run, killed; or a copy of the whole one, without its last checkpoints."""
    whole, _ = runs.whole(row.settings, row.whole)
    saving = {} if row.background else {"checkpoint": {"async": False}}
    if row.kill is None:
        directory = shutil.copytree(whole.run.directory, runs.base / name)
        for step in range(STOPPED + 1, tiny.STEPS + 1):
            shutil.rmtree(checkpoint(directory, step), ignore_errors=True)
    else:
        config = recipe(runs.base, name, row.settings, row.before or row.whole, **saving)
        with pytest.raises(RankFailed, match="died with exit code -9"):
            ranks.run(parallel_of(row.before or row.whole)[0], train, config, row.kill)
    return recipe(runs.base, name, row.settings, row.after, **saving)


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=str(row), marks=() if row.quick else pytest.mark.long) for row in ROWS]
)
def test_stopped_and_resumed_is_the_run_that_was_never_stopped(runs, ranks, row):
    whole, results = runs.whole(row.settings, row.whole)
    config = stopped(row, runs, ranks, f"resumed {ROWS.index(row)}")
    resumed = ranks.run(parallel_of(row.after)[0], train, config)
    directory, expected = config.run.directory, whole.run.directory
    num_steps = len(resumed[0]["rows"])
    if row.kill is None:
        assert [(kind, step) for kind, step in tiny.kinds(directory) if kind == "resume"] == [("resume", STOPPED)]
        assert num_steps == tiny.STEPS - STOPPED
    if row.kill == (0, 8):
        assert num_steps in (tiny.STEPS - 6, tiny.STEPS - 3), "from step 6, or from 3 if 6 was not committed yet"
    if row.whole == row.after == (row.before or row.whole):
        assert tiny.losses(directory) == tiny.losses(expected)
        assert_every_byte(checkpoint(directory), checkpoint(expected))
    else:
        assert_close(expected, directory, *((1e-10, 1e-10) if row.settings in BESIDE_A_BASE else row.tolerances))
    if row.whole.startswith("shard") and row.after in (
        "one",
        "shard4",
        "shard2",
    ):  # ranks read rows of their own, one after the other
        order = [sum((result["rows"][step] for result in results), []) for step in range(tiny.STEPS)]
        assert [sum((result["rows"][step] for result in resumed), []) for step in range(num_steps)] == order[
            -num_steps:
        ]


def test_ranks_that_share_samples_read_the_same_rows(runs):
    for settings, layout in (("heads", "tp2"), ("documents", "context2")):
        _, (first, second) = runs.whole(settings, layout)
        assert first["rows"] == second["rows"], layout


def test_dropout_is_reported_before_step_1_and_changes_the_losses(runs, ranks):
    whole, _ = runs.whole("dropout", "shard2")
    logged = header(whole)["dropout"]
    assert logged.startswith("resid_pdrop 0.1, embd_pdrop 0.1, attn_pdrop 0.1") and "model.attn_pdrop=0.0" in logged
    model = {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = recipe(runs.base, "undropped", "fused", "shard2", model=model, run={"steps": 3})
    ranks.run(2, train, config)
    with_dropout, without = tiny.losses(whole.run.directory), tiny.losses(config.run.directory)
    assert len(without) == 3 and all(abs(with_dropout[step][0] - without[step][0]) > 1e-6 for step in without)
    assert "dropout" not in header(config)


def header(config):
    return tiny.lines(config.run.directory)[0]["derived"]


def test_a_finished_run_started_again_says_so_and_writes_nothing(runs, ranks, capsys):
    config = recipe(runs.base, "again", "fused", "one", run={"steps": 3})
    directory = config.run.directory
    assert ranks.run(1, train, config)[0]["step"] == 3
    config.run.directory.joinpath("recipe.yaml").write_text("# override: b=2\n# override: a=1\nseed: 1\n")
    config._recipe = "# override: a=1\n# override: b=2\nseed: 1\n"
    written = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != ".lock"}
    result = loop.train(config)
    assert (result.step, result.stopped) == (3, False)
    loss = [line["loss"] for line in tiny.lines(directory) if line["kind"] == "validation"][-1]
    assert capsys.readouterr().out == (
        f"{directory} has finished: step 3, validation loss {loss:.4f} at the end\n"
        "to train on, raise run.steps, which is 3; else use another run.directory\n"
    )
    assert all(path.read_bytes() == content for path, content in written.items())
    assert ranks.run(2, train, config) == [{"rows": [], "step": 3}] * 2, "on any number of ranks"
    assert [kind for kind, _ in tiny.kinds(directory)].count("end") == 1


def test_a_finished_run_goes_on_where_something_differs(runs, ranks):
    config = recipe(runs.base, "longer", "fused", "one", run={"steps": 3})
    ranks.run(1, train, config)
    longer = recipe(runs.base, "longer", "fused", "one", run={"steps": 5})
    assert len(ranks.run(1, train, longer)[0]["rows"]) == 2
    shutil.rmtree(checkpoint(config.run.directory, 5))
    assert len(ranks.run(1, train, longer)[0]["rows"]) >= 1, "its last checkpoint is gone"
    assert [kind for kind, _ in tiny.kinds(config.run.directory)].count("end") == 3


def test_fp16_skips_while_its_scale_falls_and_trains_in_between(runs):
    whole, _ = runs.whole("fp16", "shard2")
    text = (whole.run.directory / "events.jsonl").read_text()
    lines = {line["step"]: line for line in map(json.loads, text.splitlines()) if line["kind"] == "step"}
    skipped = [step for step, line in lines.items() if line["skipped"]]
    assert skipped[0] == 1 and 2 <= len(skipped) <= 5, skipped
    assert all(line["gradient_norm"] is None for step, line in lines.items() if step in skipped)
    assert all(4 < line["loss"] < 7 for line in lines.values()), "in nats, whatever the scale"
    assert lines[10]["loss"] < lines[1]["loss"]
    assert '"incident"' not in text, "an overflow of the scale is no incident"


def test_a_run_says_how_much_it_gathers_in_fp8(runs):
    whole, _ = runs.whole("fp8", "shard2")
    directory = whole.run.directory
    first, model = read_events(directory / "events.jsonl")[0], newest_trainer_state(directory)["model"]
    shapes = parameter_shapes(architecture_from_hf(model))
    matrices = [math.prod(shape) for name, shape in shapes.items() if name.endswith("_proj.weight")]
    assert len(matrices) == 14 and first["facts"]["fp8_elements"] == sum(matrices)


def test_a_checkpoint_of_bf16_weights_is_read_by_every_other_job(runs):
    saved = open_saved(runs.whole("bf16-pure", "shard2")[0].run.directory)
    assert saved.step == tiny.STEPS
    assert all(parameter.isfinite().all() for parameter in saved.model.parameters())
