"""What a rank writes: to the terminal, to its log, and to its stderr when it fails."""

import logging
import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from windlass.errors import UserError
from windlass.output import quiet_libraries, redirected_output, silent_imports


class Terminal:
    """What rank 0 shows; ~ where it was flushed."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text
        return len(text)

    def flush(self):
        self.text += "~"

    def isatty(self):
        return True


def test_rank_0_keeps_the_terminal_and_logs_whole_lines(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    output = redirected_output(tmp_path / "run", 0)
    output.__enter__()
    print("one", "line")
    print("flushed", flush=True)
    sys.stdout.write("in one\n\x1b[1mbold\x1b[0m\n")
    sys.stdout.write("\r\x1b[2Kprogress 1")
    sys.stdout.write("\r\x1b[2Kprogress 2")
    sys.stdout.write("\r\x1b[2K")
    print("after progress")
    print("pieces", end=" ")
    print("joined")
    assert sys.stdout.isatty()
    output.__exit__(None, None, None)
    assert sys.stdout is terminal
    print("not logged")
    assert terminal.text.startswith("one line\nflushed\n~in one\n\x1b[1mbold") and "progress 1" in terminal.text
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert log == "one line\nflushed\nin one\nbold\nafter progress\npieces joined\n"
    with redirected_output(tmp_path / "run", 0):
        pass
    assert (tmp_path / "run" / "logs" / "rank-0.log").read_text() == log, "a resumed run appends"


def write_from_every_kind(path):
    import pathlib

    with redirected_output(pathlib.Path(path), dist.get_rank() + 1):
        print("from python")
        print("to stderr", file=sys.stderr)
        subprocess.run(["echo", "from a child"], check=True)
        sys.stdout.flush()
        sys.stderr.flush()


def test_other_ranks_write_to_their_log_alone(ranks, tmp_path):
    ranks.run(2, write_from_every_kind, str(tmp_path))
    for rank in (1, 2):
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert set(log.splitlines()) == {"from python", "to stderr", "from a child"}


def test_a_rank_that_is_through_writes_where_it_did_before(tmp_path):
    code = "\n".join(
        [
            "import subprocess, sys",
            "from pathlib import Path",
            "from windlass.output import redirected_output, silent_imports",
            "print('before')",
            "with redirected_output(Path(sys.argv[1]), 1):",
            "    print('inside')",
            "    print('inside', file=sys.stderr)",
            "print('behind')",
            "sys.stdout.flush()",
            "subprocess.run(['echo', 'child'], check=True)",
            "print('behind', file=sys.stderr)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("before\nbehind\nchild\n", "behind\n")
    assert (tmp_path / "logs" / "rank-1.log").read_text().split() == ["inside", "inside"]


FAILING = """
import os, sys
from pathlib import Path
from windlass.errors import UserError
from windlass.output import redirected_output, silent_imports

with redirected_output(Path(sys.argv[1]), 1):
    for line in range(40):
        print("line", line)
    raise {error}
"""


@pytest.mark.parametrize("agent", [None, "7"])
def test_what_a_failing_rank_wrote_last_reaches_its_stderr_where_no_launcher_of_ours_shows_it(tmp_path, agent):
    environ = {name: value for name, value in os.environ.items() if name != "WINDLASS_AGENT_PID"}
    environ |= {"WINDLASS_AGENT_PID": agent} if agent else {}

    def fail(error):
        command = [sys.executable, "-c", FAILING.format(error=error), str(tmp_path)]
        return subprocess.run(command, env=environ, capture_output=True, text=True)

    shown = fail("ValueError('the cause')").stderr.splitlines()
    log = tmp_path / "logs" / "rank-1.log"
    if agent:
        assert shown == []
    else:
        assert shown[0] == "windlass: rank 1 failed" and shown[-1] == f"(the end of {log})" and len(shown) == 32
        assert shown[-2] == "ValueError: the cause" and "line 39" in shown and "line 9" not in shown
    assert log.read_text().endswith("ValueError: the cause\n"), "the traceback is in the log too"
    of_another = "type('OfAnother', (UserError,), {'elsewhere': True})('given', 'a rule', 'a change')"
    assert fail(of_another).stderr == "", "that rank shows it"
    known = fail("UserError('given', 'a rule', 'a change')").stderr
    assert known == ("" if agent else "windlass: rank 1: given\n  rule:   a rule\n  change: a change\n")


def test_what_a_later_run_of_the_same_rank_fails_with_reaches_its_stderr_too(tmp_path):
    code = """
import sys
from pathlib import Path
from windlass.output import redirected_output, silent_imports

for run in "abcd":
    try:
        with redirected_output(Path(sys.argv[1]) / run, 1):
            print("inside", run)
            if run != "b":
                raise ValueError(run)
    except ValueError:
        pass
    print("behind", run)
"""
    environ = {name: value for name, value in os.environ.items() if name != "WINDLASS_AGENT_PID"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environ, capture_output=True, text=True)
    assert [line for line in done.stderr.splitlines() if line.startswith("ValueError")] == [
        f"ValueError: {run}" for run in "acd"
    ]
    assert done.stdout == "behind b\n", "what failed has led to its log since"
    logs = {run: (tmp_path / run / "logs" / "rank-1.log").read_text().splitlines() for run in "abcd"}
    assert logs == {
        "a": ["inside a", "behind a"],
        "b": ["inside b"],
        "c": ["inside c", "behind c"],
        "d": ["inside d", "behind d"],
    }


@pytest.mark.parametrize("agent", [None, "7"])
def test_rank_0s_traceback_is_on_its_stderr_and_under_our_launcher_in_its_log(tmp_path, agent):
    environ = {name: value for name, value in os.environ.items() if name != "WINDLASS_AGENT_PID"}
    environ |= {"WINDLASS_AGENT_PID": agent} if agent else {}
    code = FAILING.format(error="ValueError('the cause')").replace(", 1)", ", 0)")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environ, capture_output=True, text=True)
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    assert done.returncode == 1 and "line 39\n" in log and "line 39\n" in done.stdout
    traced, other = (log, done.stderr) if agent else (done.stderr, log)
    assert traced.endswith("ValueError: the cause\n") and "Traceback" in traced and "Traceback" not in other


@pytest.mark.parametrize(
    ("rank", "place", "why"),
    [(0, "logs", "File exists"), (1, "logs", "File exists"), (0, "logs/rank-0.log", "Is a directory")],
)
def test_what_is_in_the_place_of_a_log_is_named(tmp_path, rank, place, why):
    found = tmp_path / place
    found.mkdir(parents=True) if place.endswith(".log") else found.write_text("")
    with pytest.raises(UserError) as caught, redirected_output(tmp_path, rank):
        raise AssertionError("not reached")
    assert caught.value.given == f"the log {tmp_path}/logs/rank-{rank}.log cannot be opened: {why}"
    assert caught.value.rule == "every rank has a file logs/rank-N.log in the run directory"
    assert caught.value.change == "remove the file that is in the way, or fix the permissions of the run directory"


def test_what_packages_log_while_they_are_imported_is_not_shown_and_what_comes_later_is(caplog):
    with pytest.raises(ImportError), silent_imports():
        logging.getLogger("a.package").warning("no kernel for this GPU")
        raise ImportError
    logging.getLogger("a.package").warning("a thing that the user does")
    assert caplog.messages == ["a thing that the user does"]


def test_what_torchao_logs_of_its_kernels_and_enums_is_no_warning_to_the_user(caplog):
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    before = [one.level for one in loggers]
    try:
        quiet_libraries()
        logging.getLogger("torchao.kernel").warning("no kernel for this GPU")
        loggers[1].warning("an enum")
        loggers[1].error("broken")
    finally:
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)
    assert caplog.messages == ["broken"]


def test_a_command_that_loads_transformers_writes_nothing_to_stderr(tmp_path):
    """Four lines of torchao's, where it is installed, came before every export."""
    pytest.importorskip("torchao")
    code = "import sys, windlass.cli.main as main; main.app = lambda: __import__('torchao.float8.float8_linear'); main.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
