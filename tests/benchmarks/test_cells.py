"""Cells: budget, order, what is skipped and repeated, what goes wrong in one, and that a trial is never a measurement."""

import json
from types import SimpleNamespace

import cells
import pytest
import torch
from book import Book
from cells import Absent, Cell, exit_code, meaning, parse, plain, run_cells


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Seconds go by only where a test says so, and nothing is to be freed."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(cells, "time", clock)
    monkeypatch.setattr(cells, "free", lambda device: None)
    return clock


def options(tmp_path, *more, minutes="1"):
    out = str(tmp_path / "trial.json")
    return parse("script", "", ["--device", "cpu", "--tiny", "--out", out, "--minutes", minutes, *more])


def cell(name, result=None, estimate_s=1.0, sources=(), seconds=1.0, **settings):
    def measure(device):
        cells.time.now += seconds
        if isinstance(result, BaseException):
            raise result
        return {"ran": result}

    return Cell(name, estimate_s, measure, tuple(sources), settings)


def statuses(book):
    return {name: row["status"] for name, row in book.rows().items()}


# ---- the budget


def test_no_cell_is_begun_that_would_end_after_the_minutes(tmp_path, capsys):
    given = [cell("first"), cell("long", estimate_s=60.0), cell("short"), cell("last", estimate_s=58.0)]
    book = run_cells(given, options(tmp_path))
    assert statuses(book) == {"first": "measured", "short": "measured", "last": "measured"}
    assert "not reached, start it again: long\n" in capsys.readouterr().out
    book = run_cells(given, options(tmp_path, minutes="2"))
    assert list(statuses(book)) == ["first", "short", "last", "long"]


def test_estimates_grow_with_what_cells_really_took(tmp_path):
    given = [cell("slow", estimate_s=2.0, seconds=10.0), cell("next", estimate_s=11.0), cell("less", estimate_s=10.0)]
    assert list(statuses(run_cells(given, options(tmp_path)))) == ["slow", "less"]  # five times: 55 s and 50 s, of 50


def test_estimates_do_not_shrink(tmp_path):
    given = [cell("quick", estimate_s=10.0), cell("next", estimate_s=59.5)]
    assert list(statuses(run_cells(given, options(tmp_path)))) == ["quick"]


def test_the_minutes_count_from_the_start_of_the_program(tmp_path, clock):
    given = options(tmp_path)
    clock.now += 59.5
    assert statuses(run_cells([cell("late")], given)) == {}


# ---- the file


def test_every_cell_is_in_the_file_before_the_next_begins(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_cells([cell("done"), cell("cut off", KeyboardInterrupt())], options(tmp_path))
    content = json.loads((tmp_path / "trial.json").read_text())
    assert [row["name"] for row in content["cells"]] == ["done"]
    assert [path.name for path in tmp_path.iterdir()] == ["trial.json"]


def test_a_row_says_what_ran_and_where(tmp_path):
    run_cells([cell("one", 7, rows=3)], options(tmp_path))
    content = json.loads((tmp_path / "trial.json").read_text())
    (row,), (date,) = content["cells"], content["runs"]
    assert row.keys() == {"name", "device", "torch", "run", "status", "result", "seconds", "settings", "fingerprint"}
    assert (row["result"], row["settings"], row["torch"], row["run"]) == (
        {"ran": 7},
        {"rows": 3},
        torch.__version__,
        date,
    )
    run = content["runs"][date]
    assert run["trial"] and run["device_type"] == "cpu" and {"cuda", "cudnn", "commit", "uncommitted"} <= run.keys()


def test_a_measured_cell_is_skipped_until_it_is_asked_for_again(tmp_path):
    run_cells([cell("a", 1), cell("ab", 1), cell("c", 1)], options(tmp_path))
    again = [cell("a", 2), cell("ab", 2), cell("c", 2)]
    assert {row["result"]["ran"] for row in run_cells(again, options(tmp_path)).rows().values()} == {1}
    rows = run_cells(again, options(tmp_path, "--again", "b")).rows()
    assert {name: row["result"]["ran"] for name, row in rows.items()} == {"a": 1, "ab": 2, "c": 1}
    rows = run_cells(again, options(tmp_path, "--again", "--only", "a")).rows()
    assert {name: row["result"]["ran"] for name, row in rows.items()} == {"a": 2, "ab": 2, "c": 1}


def test_other_code_or_settings_are_measured_again_and_comments_are_not_code(tmp_path):
    source = tmp_path / "source.py"
    source.write_text('"""Doc."""\nx = 1\n')

    def ran(result, **settings):
        rows = run_cells([cell("one", result, sources=[source], **settings)], options(tmp_path)).rows()
        return rows["one"]["result"]["ran"]

    assert ran(1) == 1
    source.write_text('"""Another."""\n# why\nx  =  1\n')
    assert ran(2) == 1
    source.write_text("x = 2\n")
    assert ran(3) == 3
    assert ran(4, rows=1) == 4
    assert (
        meaning('def f():\n    """Doc."""\n')
        == meaning("def f():\n    'Other.'\n")
        != meaning("def g():\n    'Doc.'\n")
    )


def test_another_device_and_another_torch_keep_their_rows(tmp_path):
    path = tmp_path / "gpu.json"
    run = {"date": "1", "device": "A", "torch": "2.13", "device_type": "cuda", "trial": False}
    Book(path, "script", run).add({"name": "one", "status": "measured"})
    Book(path, "script", run | {"date": "2", "device": "B"}).add({"name": "one", "status": "measured"})
    Book(path, "script", run | {"date": "3", "torch": "2.11"}).add({"name": "one", "status": "failed"})
    book = Book(path, "script", run | {"date": "4"})
    book.add({"name": "one", "status": "out of memory"})
    assert statuses(book) == {"one": "out of memory"}
    assert sorted(row["run"] for row in book.content["cells"]) == sorted(book.content["runs"]) == ["2", "3", "4"]


def test_trials_and_measurements_and_other_scripts_are_never_merged(tmp_path):
    run = {"date": "1", "device": "A", "torch": "2.13", "device_type": "cuda", "trial": False}
    Book(tmp_path / "trial.json", "script", run).add({"name": "one", "status": "measured"})
    with pytest.raises(SystemExit, match="name another file by --out"):
        run_cells([cell("one")], options(tmp_path))
    with pytest.raises(SystemExit, match="holds script"):
        Book(tmp_path / "trial.json", "another", run)


# ---- what goes wrong in a cell


def test_a_cell_that_fails_is_reported_in_its_row_and_the_others_go_on(tmp_path, capsys):
    path = "/somewhere/deep/in/a/machine"
    given = [
        cell("memory", torch.OutOfMemoryError("Tried to allocate 2.00 GiB")),
        cell("old torch", Absent("torch 2.11 has no such thing")),
        cell("no backward", NotImplementedError("not on this device")),
        cell("broken", RuntimeError(f"bad {path}/kernel.cu at https://host/a/b")),
        cell("fine"),
    ]
    book = run_cells(given, options(tmp_path))
    kinds = ["out of memory", "absent", "absent", "failed", "measured"]
    assert list(statuses(book).values()) == kinds
    rows = book.rows()
    assert rows["memory"]["message"] == "Tried to allocate 2.00 GiB"
    assert rows["broken"]["message"].startswith("RuntimeError in ") and "test_cells.py:" in rows["broken"]["message"]
    assert "bad kernel.cu at https://host/a/b" in rows["broken"]["message"] and path not in str(book.content)
    assert exit_code(book) == 1 and "failed: broken" in capsys.readouterr().err


def test_known_reasons_are_no_failure(tmp_path):
    given = [cell("memory", torch.OutOfMemoryError("no room")), cell("absent", Absent("no such thing")), cell("fine")]
    assert exit_code(run_cells(given, options(tmp_path))) == 0


def test_what_failed_is_not_tried_again_by_itself(tmp_path):
    run_cells([cell("one", torch.OutOfMemoryError("no room"))], options(tmp_path))
    assert statuses(run_cells([cell("one")], options(tmp_path))) == {"one": "out of memory"}
    assert statuses(run_cells([cell("one")], options(tmp_path, "--again"))) == {"one": "measured"}


def test_a_device_that_answers_no_more_ends_the_program_after_its_row(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "is_alive", lambda device: False)
    with pytest.raises(SystemExit, match="start the script again"):
        run_cells([cell("one", RuntimeError("illegal memory access")), cell("two")], options(tmp_path))
    assert [row["name"] for row in json.loads((tmp_path / "trial.json").read_text())["cells"]] == ["one"]


def test_plain_keeps_what_is_no_path():
    assert plain("a/b 1/2 N/A /x") == "a/b 1/2 N/A /x"
    assert plain("in '/a/b-c/d.py', line 3") == "in 'd.py', line 3"
    assert len(plain("x" * 5000)) == cells.MESSAGE_CHARACTERS


# ---- a trial is no measurement


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cpu", "--tiny"], "is no GPU figure: give --out"),
        (["--tiny"], "is no GPU figure: give --out"),
        (
            ["--device", "cpu", "--tiny", "--out", str(cells.RESULTS / "gpu-script.json")],
            "outside of benchmarks/results",
        ),
        (["--device", "cpu", "--out", "trial.json"], "add --tiny"),
    ],
)
def test_a_trial_cannot_pass_for_a_measurement(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("script", "", arguments)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_a_measurement_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse("script", "", [])
    assert "no CUDA device" in capsys.readouterr().err


def test_what_is_committed_was_measured_on_a_gpu_at_full_size():
    for path in cells.RESULTS.glob("gpu-*.json"):
        content = json.loads(path.read_text())
        assert path.name == f"gpu-{content['script'].replace('_', '-')}.json"
        for run in content["runs"].values():
            assert run["device_type"] == "cuda" and not run["trial"] and run["commit"], (path, run)
        assert {row["run"] for row in content["cells"]} == set(content["runs"])
