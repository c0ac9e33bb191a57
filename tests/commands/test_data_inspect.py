"""`windlass data inspect`: figures, marks that need no colour, and no text that speaks to the terminal."""

import pytest
from typer.testing import CliRunner

from tests import tiny
from windlass.cli.main import app
from windlass.commands.data_inspect import render_sample
from windlass.config import to_yaml
from windlass.data.lint.statistics import Segment
from windlass.data.prepare.prepare import prepare
from windlass.errors import UserError

SAMPLE = [
    Segment("context", "<eos>", 1),
    Segment("masked", "question", 2),
    Segment("target", "answer", 2),
    Segment("end", "<eos>", 1),
    Segment("padding", "", 7),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("inspect")
    config = tiny.recipe(base)
    prepare(config.data, config.evaluate.sets, log=lambda line: None)
    (base / "tiny.yaml").write_text(to_yaml(config))
    return base


def logged(*arguments):
    done = CliRunner().invoke(app, ["data", "inspect", *map(str, arguments)])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_a_set_is_reported_in_figures_and_one_sample(base):
    out = logged(base / "tiny.yaml", "--set", "validation", "--sample", 1)
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ")}
    assert out.startswith(f"{base / 'data'}: validation (sets: train, validation)\n")
    assert lines["samples"].endswith("of 16 targets") and "bytes per token" in lines["text"]
    assert "100.00% of what is no padding" in lines["in"] and "shortest" in lines["length"] and "█" in out
    assert "sample 1 (validation, shard.00000.mds, sample 1)" in out and "\x1b" not in out


def test_a_sample_is_found_by_the_shard_and_row_that_a_run_names(base):
    by_number, by_place = (logged(base / "data", "--sample", name) for name in ("2", "0/2"))
    assert by_place == by_number and "sample 2 (train, shard.00000.mds, sample 2)" in by_place
    with pytest.raises(UserError, match=r"--sample 9/0\n.*or shard/row, of the shards 0 to \d"):
        logged(base / "data", "--sample", "9/0")


def test_a_directory_is_reported_as_its_recipe_is(base):
    assert logged(base / "data") == logged(base / "tiny.yaml")


def test_a_set_that_is_not_there_is_refused(base):
    with pytest.raises(UserError) as caught:
        logged(base / "data", "--set", "valdation")
    assert (
        caught.value.given == "--set valdation"
        and caught.value.rule == f"the sets of {base / 'data'} are train, validation"
    )
    assert caught.value.change == "did you mean `validation`? give one of them"


def test_without_colour_what_is_not_learned_is_marked():
    assert render_sample(SAMPLE, is_marked=True).plain == (
        "⟦<eos>⟧⟦question⟧answer<eos>\n-----\n\n[7 positions of padding]"
    )


def test_in_colour_what_is_not_learned_is_dim_and_nothing_is_marked():
    text = render_sample(SAMPLE, is_marked=False)
    assert text.plain.startswith("<eos>questionanswer<eos>\n-----\n")
    assert {text.plain[span.start : span.end]: span.style for span in text.spans}["question"] == "dim"


@pytest.mark.parametrize("is_marked", [True, False])
def test_control_characters_are_shown_and_not_sent(is_marked):
    text = render_sample([Segment("target", "a\x1b[31mred\x07\tb\n\x7f\x9b", 3)], is_marked).plain
    assert text == "a\\x1b[31mred\\x07\tb\n\\x7f\\x9b"


def test_a_report_is_a_page_in_this_directory_or_where_it_is_asked_for(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pages = []
    for place, more, name in (
        (base / "tiny.yaml", [], "data.html"),
        (base / "data", ["--output", "of.html"], "of.html"),
    ):
        done = CliRunner().invoke(app, ["data", "report", str(place), *more])
        assert (done.exit_code, done.stdout) == (0, f"{name}\n")
        pages.append((tmp_path / name).read_text())
    assert pages[0] == pages[1] and pages[0].startswith("<!doctype html>") and "<h1>data</h1>" in pages[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.html", "of.html"]


def test_a_report_into_a_directory_that_is_not_there_is_refused_before_anything_is_read(base, monkeypatch):
    monkeypatch.setattr("windlass.commands.data_inspect.lint_whole", None)
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(app, ["data", "report", str(base / "data"), "--output", "no/a.html"], catch_exceptions=False)
    assert (caught.value.given, caught.value.rule) == ("--output no/a.html", "there is no directory no")
