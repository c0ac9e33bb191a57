"""`windlass stacks RUN`: a rank in a few lines, or as JSON; a mistake where none runs here."""

import json
import os
import signal
import time

import pytest

from tests.supervise.hanging import ranks  # noqa: F401
from windlass.commands.stacks import stacks
from windlass.errors import UserError
from windlass.supervise.heartbeat import read_beats


def test_stacks_prints_a_rank_or_a_line_of_json_and_says_where_there_is_none(ranks, tmp_path):  # noqa: F811
    pid = ranks()
    assert "".join(stacks(tmp_path)).startswith("rank 0: step 4, data for ")
    found = json.loads("".join(stacks(tmp_path, in_json=True)))
    assert (found["pid"], found["step"], found["phase"], found["at"]) == (pid, 4, "data", "<string>:7 deepest")
    os.kill(pid, signal.SIGKILL)
    while read_beats(tmp_path)[0].is_alive:
        time.sleep(0.01)
    with pytest.raises(UserError, match="no rank of a run"):
        list(stacks(tmp_path))
