"""A command as it is typed, run in the test's own process."""

import sys

import pytest

from windlass.cli import main as cli


def run_command(words, monkeypatch, capsys):
    """`windlass` with `words` -> the exit code, and what was printed."""
    monkeypatch.setattr(sys, "argv", ["windlass", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code or 0, capsys.readouterr()
