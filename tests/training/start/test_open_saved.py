"""A model is the same wherever it is read from, and a damaged one is refused."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from windlass.checkpoint.hashed_file import PieceWriter
from windlass.checkpoint.manifest import MANIFEST, TRAINER_STATE
from windlass.checkpoint.sealed_json import seal, unseal
from windlass.commands import checkpoints
from windlass.commands.models.generate import generate
from windlass.commands.models.sampling import Sampling
from windlass.errors import BadCheckpoint, UserError
from windlass.training.start.open_saved import find_checkpoint, open_saved, read_trainer_state


def test_text_is_the_same_from_the_run_the_checkpoint_a_copy_and_the_export(run, exported, tmp_path):
    newest = find_checkpoint(run, None)
    copied = shutil.copytree(newest, tmp_path / "elsewhere")
    texts = {
        generate(path, ["the deck"], Sampling(max_tokens=12, seed=5))[0]
        for path in (run, newest, copied, exported.directory)
    }
    assert len(texts) == 1


def test_a_damaged_checkpoint_is_refused_by_name(run, tmp_path):
    copied = shutil.copytree(find_checkpoint(run, None), tmp_path / "bad")
    weights = bytearray((copied / "rank-00001.bin").read_bytes())
    for place in range(100, len(weights), 997):  # weights and states: only what is asked for is read, and verified
        weights[place] ^= 1
    (copied / "rank-00001.bin").write_bytes(weights)
    with pytest.raises(BadCheckpoint, match=r"rank-00001\.bin"):
        list(checkpoints.verify_checkpoints(copied))
    with pytest.raises(BadCheckpoint, match=r"rank-00001\.bin"):
        open_saved(copied)


def with_trainer_state(checkpoint, target, change):
    """A copy of `checkpoint` whose trainer state is what `change` makes of it, and whose hashes fit."""
    shutil.copytree(checkpoint, target)
    path = target / TRAINER_STATE
    body = unseal(path.read_bytes(), TRAINER_STATE)
    path.unlink()
    with PieceWriter(path) as writer:
        writer.write(memoryview(seal({**body, "trainer_state": change(body["trainer_state"])})))
        entry = writer.close()
    manifest = unseal((target / MANIFEST).read_bytes(), MANIFEST)
    manifest["files"][TRAINER_STATE] = entry.model_dump()
    (target / MANIFEST).write_bytes(seal(manifest))
    return target


def larger(**fields):
    return lambda state: {**state, "model": {**state["model"], **fields}}


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (lambda state: list(state), "holds a list"),
        (lambda state: None, "holds a NoneType"),
        (lambda state: {key: value for key, value in state.items() if key != "model"}, "has no model"),
        (lambda state: {**state, "model": [1]}, "has no model"),
        (lambda state: {**state, "step": "7"}, "has no step"),
    ],
)
def test_a_trainer_state_of_another_form_is_refused_in_words(run, tmp_path, change, given):
    hostile = with_trainer_state(find_checkpoint(run, None), tmp_path / "hostile", change)
    for read in (read_trainer_state, open_saved):
        with pytest.raises(BadCheckpoint) as caught:
            read(hostile)
        assert caught.value.given == f"trainer_state.json of {hostile} {given}"


OPEN_ALL = """
import resource, sys
from pathlib import Path
from windlass.errors import UserError
from windlass.training.start.open_saved import open_saved

pages = int(Path("/proc/self/statm").read_text().split()[0])
most = pages * resource.getpagesize() + (200 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
for path in sys.argv[1:]:
    try:
        open_saved(Path(path))
        print("opened")
    except UserError as error:
        print(error.given)
"""
HOSTILE = ({"num_hidden_layers": 10**7}, {"hidden_size": 10**6}, {"vocab_size": 10**12}, {"intermediate_size": 10**7})


def test_hostile_sizes_are_refused_before_memory_is_taken(run, exported, tmp_path):
    """In a process that may take 200 MiB: the sizes stated would take gigabytes, or a lifetime of counting."""
    paths = [find_checkpoint(run, None), exported.directory]
    for number, fields in enumerate(HOSTILE):
        paths.append(with_trainer_state(paths[0], tmp_path / f"checkpoint-{number}", larger(**fields)))
        paths.append(shutil.copytree(paths[1], tmp_path / f"export-{number}"))
        config = json.loads((paths[-1] / "config.json").read_text()) | fields
        (paths[-1] / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-c", OPEN_ALL, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["opened", "opened"] and len(lines) == len(paths)
    for path, line, fields in zip(paths[2:], lines[2:], [fields for fields in HOSTILE for _ in range(2)], strict=True):
        (name, value), (stated, _, rest) = *fields.items(), line.partition(", and its weights are ")
        assert rest.endswith("elements in all") and stated.startswith(f"{path} states "), line
        assert stated.endswith(f"{name} {value}") or "parameters" in stated, line


def test_a_step_that_was_saved_and_deleted_is_no_step_that_never_was(run, tmp_path):
    copied = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(copied / "checkpoints" / "step-00000003")
    with pytest.raises(UserError) as caught:
        find_checkpoint(copied, 3)
    error = caught.value
    assert error.given == f"step 3 of {copied} was saved, and deleted when newer ones were there"
    assert error.rule == (
        "a run keeps its newest checkpoints (checkpoint.keep_last=10), those of the lowest validation loss "
        "(checkpoint.keep_best=0) and the steps of checkpoint.keep_steps"
    )
    assert error.change == "choose one of: 0, 6, 9, 10; in the next run checkpoint.keep_steps=[3] keeps it"
    with pytest.raises(UserError) as caught:
        find_checkpoint(copied, 4)
    assert caught.value.rule == "only committed checkpoints can be read"
