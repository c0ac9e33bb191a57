import shutil

import pytest
import torch

from tests.checkpoint.cases import make_run, make_tensors, save_steps
from windlass.checkpoint.commit import committed_steps, quarantine
from windlass.checkpoint.config import CheckpointConfig
from windlass.checkpoint.keep import diff, kept_steps, list_checkpoints, prune, size_problems
from windlass.checkpoint.verify import complaint, verify_checkpoint
from windlass.errors import UserError


@pytest.mark.parametrize(
    "settings, kept",
    [
        ({"keep_last": 1}, {50}),
        ({"keep_last": 2}, {40, 50}),
        ({"keep_last": 9}, {0, 10, 20, 30, 40, 50}),
        ({"keep_last": 1, "keep_best": 1}, {20, 50}),
        ({"keep_last": 1, "keep_best": 2}, {20, 40, 50}),  # 10 and 40 tie: the newer
        ({"keep_last": 1, "keep_best": 9}, {10, 20, 40, 50}),  # without a loss none is best
        ({"keep_last": 1, "keep_steps": [0, 30, 77]}, {0, 30, 50}),
        ({"keep_last": 2, "keep_best": 1, "keep_steps": [0]}, {0, 20, 40, 50}),
    ],
)
def test_last_best_and_pinned_are_kept(settings, kept):
    metrics = {0: None, 10: 3.0, 20: 2.0, 30: None, 40: 3.0, 50: 5.0}
    assert kept_steps(metrics, CheckpointConfig(**settings)) == kept


def test_saving_prunes_after_each_commit(tmp_path):
    metrics = {0: 9.0, 10: 1.0, 20: 4.0, 30: 3.0, 40: float("nan"), 50: 2.0}
    save_steps(tmp_path, *metrics, metrics=metrics, keep_last=1, keep_best=2, keep_steps=[0])
    assert committed_steps(tmp_path / "checkpoints") == [50, 10, 0]


def test_the_older_one_is_there_until_the_newer_is_committed(tmp_path, monkeypatch):
    checkpoints = save_steps(tmp_path, 10, keep_last=1)

    def fail(*arguments):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("windlass.checkpoint.commit.Draft.commit", fail)
    with pytest.raises(UserError, match="Input/output error"):
        checkpoints.save(20, make_tensors(20), {}, {})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]


def damage(directory):
    path = directory / "rank-00000.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\7")


def test_the_last_whole_checkpoint_is_never_pruned(tmp_path):
    save_steps(tmp_path, 10, 20, 30)
    checkpoints = tmp_path / "checkpoints"
    damage(checkpoints / "step-00000030")
    damage(checkpoints / "step-00000020")
    assert prune(checkpoints, CheckpointConfig(keep_last=1)) == [20]  # 30 is kept as the last, 10 as the last whole one
    assert committed_steps(checkpoints) == [30, 10]
    damage(checkpoints / "step-00000010")
    assert prune(checkpoints, CheckpointConfig(keep_last=1)) == []  # none is whole: nothing is deleted


def test_pruning_leaves_alone_what_it_cannot_read(tmp_path):
    save_steps(tmp_path, 10, 20, 30)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step-00000010/MANIFEST").write_text("{}")
    assert prune(checkpoints, CheckpointConfig(keep_last=1)) == [20]
    assert committed_steps(checkpoints) == [30, 10]


def test_the_list_shows_every_checkpoint_and_what_is_wrong_with_it(tmp_path):
    save_steps(tmp_path, 10, 20, 30, 40, metrics={20: 2.5})
    checkpoints = tmp_path / "checkpoints"
    damage(checkpoints / "step-00000020")
    (checkpoints / "step-00000030/MANIFEST").unlink()
    quarantine(checkpoints / "step-00000040")
    quick = list_checkpoints(tmp_path)
    assert [(row.name, row.verified) for row in quick] == [
        ("step-00000010", None),
        ("step-00000020", None),  # a listing does not read the bytes
        ("step-00000030", False),
        ("step-00000040.corrupt", False),
    ]
    rows = list_checkpoints(tmp_path, verified=True)
    assert [row.verified for row in rows] == [True, False, False, False]
    assert (rows[1].step, rows[1].metric, rows[1].world) == (20, 2.5, 1) and rows[1].num_bytes > 4_400_000
    assert rows[1].time.endswith("Z") and "rank-00000.bin: hash" in rows[1].problem
    assert "has no MANIFEST" in rows[2].problem and "put aside" in rows[3].problem


def test_a_directory_that_is_no_run_is_named(tmp_path):
    with pytest.raises(UserError, match="has no directory `checkpoints`") as caught:
        list_checkpoints(tmp_path)
    assert str(tmp_path) in caught.value.given and "run.directory" in caught.value.change


def test_diff_names_the_tensors_without_reading_them(tmp_path):
    save_steps(tmp_path, 10, 20)
    one, two = tmp_path / "checkpoints/step-00000010", tmp_path / "checkpoints/step-00000020"
    found = diff(one, two)
    assert found.bytes == ["model.bias", "model.big", "optimizer.mask", "optimizer.step"] and found.same == 1
    assert diff(one, one).same == 5
    damage(two)
    assert diff(one, two) == found  # by the hashes alone


def test_diff_names_what_only_one_has_and_what_changed_its_form(tmp_path):
    save_steps(tmp_path, 10)
    tensors = make_tensors(10)
    tensors["model.bias"] = tensors["model.bias"].float()
    tensors["model.new"] = tensors.pop("optimizer.mask")
    tensors["model.big"][1099, 999] += 1
    make_run(tmp_path).save(20, tensors, {}, {})
    found = diff(tmp_path / "checkpoints/step-00000010", tmp_path / "checkpoints/step-00000020")
    assert (found.only_first, found.only_second) == (["optimizer.mask"], ["model.new"])
    assert (found.form, found.bytes, found.same) == (["model.bias"], ["model.big"], 2)


def test_a_complaint_names_the_file_and_what_to_do(tmp_path):
    save_steps(tmp_path, 10)
    directory = tmp_path / "checkpoints/step-00000010"
    assert verify_checkpoint(directory) == []
    damage(directory)
    found = complaint(directory, verify_checkpoint(directory))
    assert "rank-00000.bin: hash" in found.given and "byte for byte" in found.rule and "older" in found.change


def test_the_quick_check_sees_what_a_listing_shows(tmp_path):
    save_steps(tmp_path, 10)
    shutil.rmtree(tmp_path / "checkpoints/step-00000010/tokenizer")
    assert [problem.what for problem in size_problems(tmp_path / "checkpoints/step-00000010")] == ["missing"]


def test_a_tensor_saved_without_dims_or_elements_compares(tmp_path):
    for step in (1, 2):
        make_run(tmp_path).save(step, {"a": torch.tensor(7), "b": torch.empty(0)}, {}, {})
    assert diff(tmp_path / "checkpoints/step-00000001", tmp_path / "checkpoints/step-00000002").same == 2


def test_a_step_that_cannot_be_deleted_is_named_and_the_others_are_deleted(tmp_path, monkeypatch):
    save_steps(tmp_path, 10, 20, 30)
    checkpoints, rename = tmp_path / "checkpoints", type(tmp_path).rename

    def refuse(path, target):
        if path.name == "step-00000010":
            raise PermissionError(13, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(type(tmp_path), "rename", refuse)
    with pytest.raises(UserError) as caught:
        prune(checkpoints, CheckpointConfig(keep_last=1))
    assert caught.value.given == f"{checkpoints}: old checkpoints cannot be deleted: step-00000010: Permission denied"
    assert committed_steps(checkpoints) == [30, 10]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_counts_although_older_steps_cannot_be_deleted(tmp_path, monkeypatch, asynchronous):
    checkpoints = make_run(tmp_path, keep_last=1, **{"async": asynchronous})
    monkeypatch.setattr("windlass.checkpoint.keep.delete_checkpoint", denied)
    for step in (10, 20):
        checkpoints.save(step, make_tensors(step), {}, {})
    checkpoints.wait()
    first, second = checkpoints.poll()
    assert (first.not_deleted, first.step, second.step) == ("", 10, 20)
    assert "step-00000010: Permission denied" in second.not_deleted
    assert committed_steps(tmp_path / "checkpoints") == [20, 10]


def denied(*_):
    raise PermissionError(13, "Permission denied")


def test_a_step_that_is_held_stays_however_old(tmp_path):
    save_steps(tmp_path, 1, 2, 3, 4)
    config = CheckpointConfig(keep_last=1)
    assert prune(tmp_path / "checkpoints", config, held={2}) == [1, 3]
    assert committed_steps(tmp_path / "checkpoints") == [4, 2]
    assert prune(tmp_path / "checkpoints", config) == [2]
