"""A model is the same wherever it is read from, and a damaged one is refused."""

import shutil

import pytest

from windlass.commands import checkpoints
from windlass.commands.generate import generate
from windlass.errors import BadCheckpoint
from windlass.training.open_saved import find_checkpoint, open_saved


def test_text_is_the_same_from_the_run_the_checkpoint_a_copy_and_the_export(run, exported, tmp_path):
    newest = find_checkpoint(run, None)
    copied = shutil.copytree(newest, tmp_path / "elsewhere")
    texts = {
        generate(path, ["the deck"], max_tokens=12, seed=5)[0] for path in (run, newest, copied, exported.directory)
    }
    assert len(texts) == 1


def test_a_damaged_checkpoint_is_refused_by_name(run, tmp_path):
    copied = shutil.copytree(find_checkpoint(run, None), tmp_path / "bad")
    weights = bytearray((copied / "rank-00001.bin").read_bytes())
    for place in range(100, len(weights), 997):  # weights and states: only what is asked for is read, and verified
        weights[place] ^= 1
    (copied / "rank-00001.bin").write_bytes(weights)
    with pytest.raises(BadCheckpoint, match=r"rank-00001\.bin"):
        list(checkpoints.check(copied))
    with pytest.raises(BadCheckpoint, match=r"rank-00001\.bin"):
        open_saved(copied)
