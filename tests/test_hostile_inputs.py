"""No input of tests/hostile.py hangs its reader, takes 200 MiB of memory, or ends in another error than ours."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.test_map import ROOT

NOT_THERE = ("status.json", "sources.json")  # a file of these that is not ours counts as none


@pytest.mark.long
def test_hostile_inputs_are_refused_in_words(tmp_path):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.hostile", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    read = [row for row in rows if row[2] == "read" and row[1] not in NOT_THERE]
    assert read == [["1.5 GiB of blank lines", "a.jsonl.gz", "read"]], "gzip packs no text to a thousandth"
    assert [row for row in rows if row[2] not in ("read", "refused")] == []
    assert not (tmp_path / "ran").exists(), "nothing of an input is executed"
    assert Counter(row[2] for row in rows) == {"refused": 159, "read": 27}
