"""scripts/rough_weather.sh on one small file: what runs below pytest is paused and goes on, and nothing else is."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "rough_weather.sh"
CONTINUED = "import signal; signal.pthread_sigmask(0, {18}); print('ready', flush=True); print(signal.sigwait({18}))"
SMALL = f"""
import os, subprocess, sys
def test_a_child_is_paused_and_goes_on():
    code = {CONTINUED!r}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["ready", "18"]
def test_this_process_uses_avx2_and_a_cache_of_its_own():
    assert os.environ["ATEN_CPU_CAPABILITY"] == "avx2" and os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert os.environ["MKL_ENABLE_INSTRUCTIONS"] == "AVX2" and os.environ["TORCHINDUCTOR_CACHE_DIR"] != "shared"
def test_red():
    assert "RED" not in os.environ
"""


@pytest.fixture
def rough(tmp_path):
    """rough(**environment) -> what the script printed and its exit code."""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / "test_small.py").write_text(SMALL)

    def run(**changes):
        command = ["bash", str(tmp_path / "scripts" / SCRIPT.name), "-q", "test_small.py", "-p", "no:cacheprovider"]
        settings = {"PY": sys.executable, "PAUSE_MS": "60", "SEED": "7", "TORCHINDUCTOR_CACHE_DIR": "shared"}
        done = subprocess.run(
            command, env={**os.environ, **settings, **changes}, capture_output=True, text=True, check=False
        )
        return done.stdout, done.returncode

    return run


def test_processes_below_pytest_are_paused_and_no_others(rough):
    stranger = subprocess.Popen([sys.executable, "-c", CONTINUED], stdout=subprocess.PIPE, text=True)
    try:
        assert stranger.stdout is not None and stranger.stdout.readline() == "ready\n"
        printed, code = rough()
        assert stranger.poll() is None, "the script has continued a process that is not below its pytest"
    finally:
        stranger.kill()
        stranger.communicate()
    assert code == 0 and printed.startswith("rough weather: SEED=7, pauses of up to 60 ms, AVX2 only\n")
    assert "3 passed" in printed and printed.endswith("pauses, pytest left with 0; SEED=7\n")


def test_its_exit_code_is_pytests(rough):
    printed, code = rough(RED="1")
    assert code == 1 and "1 failed, 2 passed" in printed
