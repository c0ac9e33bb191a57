"""`train --quiet` and `--json`: stdout is silent, or the lines of events.jsonl, on one process and on two."""

import json
import sys

import pytest

from tests import tiny
from windlass.cli import main as cli
from windlass.cli.run_lines import printing, say_next
from windlass.config import to_yaml
from windlass.errors import EXIT_USER_ERROR, UserError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("lines")


@pytest.fixture
def windlass(base, monkeypatch, capfd):
    """windlass(name, *options): a new run of the tiny recipe -> exit code, stdout, stderr, and its run directory."""

    def windlass(name, *options):
        config = tiny.recipe(base, name)
        (base / f"{name}.yaml").write_text(to_yaml(config))
        monkeypatch.setattr(sys, "argv", ["windlass", "train", str(base / f"{name}.yaml"), *options])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code, *capfd.readouterr(), config.run.directory

    return windlass


def test_json_is_the_events_and_nothing_else(windlass):
    """On two ranks: tests/cli/test_main.py."""
    code, out, err, directory = windlass("json", "--json", "--nproc=1")
    assert code == 0, err
    assert [json.loads(line) for line in out.splitlines()] == tiny.lines(directory)
    assert "finished at step 10 of 10" in err


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_quiet_prints_nothing_of_a_run_without_incidents(windlass, ranks):
    *printed, directory = windlass(f"quiet {ranks}", "--quiet", f"--nproc={ranks}")
    assert printed == [0, "", ""]
    assert "finished at step 10 of 10" in "".join(file.read_text() for file in (directory / "logs").iterdir())


def test_quiet_prints_incidents(capsys):
    with printing(True, False) as on_event:
        print("step 3")
        on_event({"kind": "step", "step": 3})
        on_event({"kind": "incident", "step": 4, "what": "a norm of 500"})
    print("after")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("after\n", "step 4: incident: a norm of 500\n")


def test_a_refusal_is_printed_all_the_same(windlass):
    code, _, err, _ = windlass("refused", "--quiet", "run.tokens_per_step=100")
    assert code == EXIT_USER_ERROR and "run.tokens_per_step=100" in err


@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_a_rehearsal_takes_neither(windlass, option):
    code, _, err, directory = windlass(f"smoke {option}", "--smoke", option)
    assert code == EXIT_USER_ERROR and f"--smoke with {option}" in err and not directory.exists()


def test_both_at_once_are_refused():
    with pytest.raises(UserError, match="--quiet and --json"), printing(True, True):
        pass


@pytest.mark.parametrize(
    ("formats", "asked"),
    [
        (["chat", "chat"], '--chat --prompt "..."'),
        (["chat", "text"], '--prompt "..."'),
        (["preference"], '--prompt "..." (--chat too, where prompts are messages)'),
    ],
    ids=" and ".join,
)
def test_the_line_at_the_end_asks_a_chat_model_in_its_template(tmp_path, capsys, formats, asked):
    """Without it a chat model writes an empty line, or nonsense."""
    sources = [{"path": "rows.jsonl", "format": one} for one in formats]
    keys = {"sources": sources, "tokenizer": {"train": None, "from": "org/name"}}
    objective = {"kind": "dpo"} if formats == ["preference"] else {}
    config = tiny.recipe(tmp_path, "a run", data=keys, objective=objective)
    say_next(config)
    run = f"'{config.run.directory}'"
    assert capsys.readouterr().out == f"next: windlass generate {run} {asked}, or windlass export {run}\n"
