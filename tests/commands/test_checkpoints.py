"""What `windlass checkpoint` prints."""

import shutil

import pytest

from windlass.commands import checkpoints
from windlass.errors import UserError


def test_checkpoint_commands_print_what_there_is(run, tmp_path):
    lines = list(checkpoints.table(run, verified=True))
    assert [line.split()[0] for line in lines[1:]] == [f"step-{step:08d}" for step in (0, 3, 6, 9, 10)]
    assert all(line.endswith("whole") for line in lines[1:])
    assert len(list(checkpoints.verify_checkpoints(run))) == 5
    changed, is_equal = checkpoints.compare_checkpoints(run / "checkpoints" / "step-00000009", run)
    assert not is_equal and checkpoints.compare_checkpoints(run, run)[1]
    assert changed[-1] == "0 tensors are equal, bit for bit"
    (logged,) = [line for line in changed if line.startswith("other values: model.model.norm.weight: by at most ")]
    assert 1e-6 < float(logged.rpartition(" ")[2]) < 1, "a step of learning"
    copied = shutil.copytree(run, tmp_path / "run")
    assert checkpoints.prune_checkpoints(copied, keep_last=1, keep_best=1) == "deleted: step 3, step 6, step 9", (
        "keep_steps stay"
    )
    assert checkpoints.prune_checkpoints(copied, keep_last=1, keep_best=1) == "deleted: nothing"


@pytest.mark.parametrize(("keep_last", "keep_best"), [(0, 0), (1, -1)])
def test_numbers_that_keep_nothing_are_refused(run, keep_last, keep_best):
    with pytest.raises(UserError, match=f"--keep-last {keep_last} --keep-best {keep_best}"):
        checkpoints.prune_checkpoints(run, keep_last, keep_best)


def test_verify_lists_files_that_windlass_did_not_write(run, tmp_path):
    directory = shutil.copytree(run / "checkpoints" / "step-00000009", tmp_path / "step-00000009")
    (directory / ".DS_Store").write_text("")
    (directory / "a\nb").write_text("")
    (line,) = checkpoints.verify_checkpoints(directory)
    assert line == f"{directory}: whole; ignored files that windlass did not write: .DS_Store, a\\nb"
