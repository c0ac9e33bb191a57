"""The page by a process of its own: written there, and a child that fails or hangs is an error with a reason."""

import subprocess
import sys

import pytest

from windlass.errors import UserError
from windlass.report.events import EventLog
from windlass.report.page.child import write_in_child


def test_the_page_is_written_by_another_process_and_this_one_loads_nothing_for_it(tmp_path):
    EventLog(tmp_path / "events.jsonl").write("start", 0, {})
    program = (
        "import sys; from pathlib import Path; from windlass.report.page.child import write_in_child; "
        f"write_in_child(Path({str(tmp_path)!r})); print({{'pyarrow', 'numpy', 'jinja2'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n" and "no end yet" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("launcher", [
    {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    {"RANK": "0", "WORLD_SIZE": "2", "WINDLASS_AGENT_PID": "1", "TORCHELASTIC_RESTART_COUNT": "0"},
    {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "a[1-2]"},
    {"PMIX_RANK": "0"},
])  # fmt: skip
def test_rank_0_of_several_writes_its_page_too(tmp_path, monkeypatch, launcher):
    """`windlass report` is refused as one of several processes."""
    EventLog(tmp_path / "events.jsonl").write("start", 0, {})
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    write_in_child(tmp_path)
    assert (tmp_path / "report.html").is_file()


def test_a_module_of_the_working_directory_is_not_taken_for_ours(tmp_path, monkeypatch):
    EventLog(tmp_path / "events.jsonl").write("start", 0, {})
    (tmp_path / "jinja2.py").write_text("raise SystemExit('not ours')")
    monkeypatch.chdir(tmp_path)
    write_in_child(tmp_path)


def test_a_child_that_fails_says_why(tmp_path):
    with pytest.raises(UserError, match=r"is not written: .*events\.jsonl does not exist") as raised:
        write_in_child(tmp_path)
    assert "windlass report" in raised.value.change


def test_a_child_that_hangs_is_ended(tmp_path):
    with pytest.raises(UserError, match="took more than 0 s"):
        write_in_child(tmp_path, longest_s=0.0)


def test_a_machine_that_starts_no_process_is_no_crash(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match=r"no process could be started \(No such file"):
        write_in_child(tmp_path)


def test_a_short_runs_page_needs_no_command_line_and_no_arrow(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.write("start", 0, {})
    log.write("step", 1, {"loss": 2.5})
    program = (
        "import sys; from pathlib import Path; from windlass.report.page.write import write_report; "
        f"write_report(Path({str(tmp_path)!r})); print({{'pyarrow', 'pandas', 'typer', 'torch'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
