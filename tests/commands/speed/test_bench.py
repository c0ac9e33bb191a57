"""`windlass bench RECIPE`: a grid of real tiny runs, cells that fail, what is appended, and every grid that is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import tiny
from windlass.cli import main as cli
from windlass.commands.speed import bench as page
from windlass.commands.speed.bench import (
    BenchRow,
    bench,
    bench_as_table,
    cells_of,
    checkout,
    efficiencies,
    failure_reason,
)
from windlass.errors import UserError
from windlass.hardware import cpu_name
from windlass.version import __version__


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("bench")
    tree = tiny.recipe(base).model_dump(mode="json", by_alias=True, exclude_none=True)
    (base / "tiny.yaml").write_text(yaml.safe_dump(tree))
    return base


def test_a_grid_is_measured_in_processes_of_their_own_and_a_cell_that_fails_is_a_row(base):
    output = base / "bench.json"
    output.write_text(json.dumps([{"rows": ["of an earlier bench"]}]))
    recipe, grid = str(base / "tiny.yaml"), ["run.micro_batch=2,3", "parallel.recompute=none"]
    before = {path.name for path in base.iterdir()}
    lines = list(bench(recipe, ["run.seed=7"], grid, [1], 6, 2, output))
    earlier, session = json.loads(output.read_text())
    good, refused = session["rows"]
    assert earlier == {"rows": ["of an earlier bench"]} and session["overrides"] == ["run.seed=7"]
    assert {"windlass", "torch", "transformers"} == set(session["versions"])
    assert session["versions"]["windlass"] == __version__ and session["hardware"] == {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
    }
    assert session["checkout"] == checkout(Path(__file__).parents[3])
    assert len(good["tokens_per_s"]) == 2 and all(rate > 0 for rate in good["tokens_per_s"]) and good["error"] is None
    assert (good["device"], good["attention"], good["mfu"]) == ("CPU", "flash for CPU", None)
    assert good["memory_bytes"] > 0 and good["settings"] == ["run.micro_batch=2", "parallel.recompute=none"]
    assert refused["tokens_per_s"] == [] and "run.micro_batch=3" in refused["error"]
    given, rule, change = refused["explanation"].splitlines()
    assert given.startswith("run.tokens_per_step=128 (8 sequences) on 1 rank") and {rule, change} <= set(lines)
    assert rule.startswith("  rule:   sequences per step") and change.startswith("  change: the nearest that divide")
    assert "2 of 2: run.micro_batch=3 parallel.recompute=none, 1 rank: exit code 2" in "\n".join(lines)
    assert lines[-1] == f"{output}, {base / 'bench.svg'}" and "no figure" in (base / "bench.svg").read_text()
    left = {path.name for path in base.iterdir()} - before
    assert left <= {"bench.svg", "data", ".data.lock"}, "no scratch directory and no run"


def test_where_no_cell_runs_the_command_fails_after_its_table(base):
    lines, output = [], base / "none.json"
    with pytest.raises(UserError, match="none of 1 cells ran") as caught:
        lines.extend(bench(str(base / "tiny.yaml"), [], ["optim.lerning_rate=1"], [1], 6, 1, output))
    assert caught.value.change == "the first: refused: optim.lerning_rate" and not output.exists()
    assert any("did you mean `learning_rate`?" in line for line in lines)


def test_the_checkout_is_windlass_own_and_says_whether_it_is_changed(tmp_path):
    assert checkout(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert checkout(tmp_path) == {"commit": head, "is_changed": False}
    (tmp_path / "file").write_text("2")
    assert checkout(tmp_path) == {"commit": head, "is_changed": True}
    (tmp_path / "lib").mkdir()
    assert checkout(tmp_path / "lib") is None, "a repository around an environment is not windlass's"


@pytest.mark.parametrize("axis", ["parallel.recompute", "recompute=none", "parallel.recompute=none,,full", "=x"])
def test_an_axis_that_is_none_is_refused(axis):
    with pytest.raises(UserError, match="--grid"):
        cells_of([axis], [1])


def test_cells_are_all_combinations_on_all_ranks():
    cells = cells_of(["run.micro_batch=1,2", "parallel.compile=true,false"], [1, 2])
    assert len(cells) == 8 and cells[0].settings == ("run.micro_batch=1", "parallel.compile=true")
    assert [cell.ranks for cell in cells[:2]] == [1, 2]
    assert [cell.settings for cell in cells_of([], [1])] == [()]


def test_too_few_steps_and_a_foreign_file_are_refused(base):
    with pytest.raises(UserError, match="--steps 5"):
        list(bench("demo", [], [], [1], 5, 1, base / "x.json"))
    (base / "foreign.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match="holds no rows"):
        list(bench("demo", [], [], [1], 6, 1, base / "foreign.json"))
    assert (base / "foreign.json").read_text() == '{"a": 1}'


@pytest.mark.parametrize(
    ("code", "printed", "words"),
    [
        (2, "noise\nwindlass: run.micro_batch=3: given\n  rule", "exit code 2: windlass: run.micro_batch=3: given"),
        (1, "Traceback\nValueError: no", "exit code 1: ValueError: no"),
        (2, "torch.OutOfMemoryError: CUDA out of memory", "out of memory"),
        (-9, "", "killed, most often for memory"),
        (3, "", "exit code 3: nothing printed"),
    ],
)
def test_why_a_cell_has_no_figure(code, printed, words):
    assert failure_reason(code, printed) == words


def test_ranks_that_scale_badly_are_warned_of():
    one, two, four = (
        BenchRow(("a.b=1",), ranks, (rate, rate * 1.1)) for ranks, rate in ((1, 100.0), (2, 180.0), (4, 200.0))
    )
    other = BenchRow(("a.b=2",), 4, (5.0,))
    assert efficiencies([four, one, two, other]) == {two: pytest.approx(0.9), four: pytest.approx(0.5)}
    lines = list(bench_as_table([one, two, four, BenchRow(("a.b=3",), 1, error="out of memory")]))
    assert [line for line in lines if line.startswith("warning")] == [
        "warning: a.b=1, 4 ranks has 50% of what its ranks do alone: windlass advise on such a run says why"
    ]
    alone, again = (list(bench_as_table([BenchRow(("a.b=4",), 1, (5.0,) * runs)]))[1].split() for runs in (1, 2))
    assert (alone[4], again[4]) == ("-", "0.0%"), "one run has no spread"
    assert "0.90" in lines[2] and "9.5%" in lines[1] and lines[4] == "a.b=3, 1 rank   out of memory"


def test_the_command_hands_on_what_it_is_given(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(page, "bench", lambda *given: map(str, given))
    arguments = ["demo", "run.seed=1", "--grid", "a.b=1", "--grid", "c.d=2,3", "--nproc", "1,2", "--steps", "9"]
    monkeypatch.setattr(sys, "argv", ["windlass", "bench", *arguments, "--output", str(tmp_path / "b.json")])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code in (0, None)
    assert capsys.readouterr().out.splitlines() == [
        "demo", "['run.seed=1']", "['a.b=1', 'c.d=2,3']", "[1, 2]", "9", "3", str(tmp_path / "b.json"),
    ]  # fmt: skip


@pytest.mark.parametrize("given", ["0", "1,x", ""])
def test_ranks_that_are_no_numbers_are_refused(monkeypatch, capsys, given):
    monkeypatch.setattr(sys, "argv", ["windlass", "bench", "demo", "--nproc", given])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2 and "--nproc" in capsys.readouterr().err
