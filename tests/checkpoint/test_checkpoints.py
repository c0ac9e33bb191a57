import time
from pathlib import Path

import pytest
import torch

from tests.checkpoint import cases
from tests.checkpoint.cases import blank, is_state_of, make_run, make_tensors, save_steps
from windlass.checkpoint.commit import DiskFull, committed_steps
from windlass.checkpoint.config import CheckpointConfig
from windlass.checkpoint.index import read_tensor_index
from windlass.checkpoint.verify import Checkpoint, verify_checkpoint


def assert_equal(one, two):
    assert set(one) == set(two)
    different = [name for name in one if not torch.equal(one[name], two[name])]
    assert not different


@pytest.mark.parametrize("asynchronous", [False, True])
def test_saved_by_two_ranks_loads_bit_equal_into_any_layout(ranks, tmp_path, asynchronous):
    """Sharded FSDP2 weights (uneven, some shards empty), tied and replicated ones, 0-dim counters, bf16. What
    training writes into the tensors after an asynchronous save has returned does not reach the checkpoint.
    """
    saved = ranks.run(2, cases.save_sharded, tmp_path / "checkpoints", asynchronous)[0]
    assert verify_checkpoint(tmp_path / "checkpoints/step-00000005") == []
    for world, sharded in ((1, False), (1, True), (2, True), (4, True), (2, False)):
        for trainer_state, loaded in ranks.run(world, cases.load_sharded, tmp_path / "checkpoints", sharded):
            assert trainer_state == {"position": 17, "step": 5}
            assert_equal(saved, loaded)


def test_one_process_without_torch_distributed_saves_and_restores_in_the_background(tmp_path):
    assert not torch.distributed.is_initialized()
    checkpoints = make_run(tmp_path, **{"async": True})
    state = make_tensors(1)
    assert checkpoints.save(1, state, {"samples": 3}, {}, metric=2.5)
    for tensor in state.values():
        tensor.zero_()
    checkpoints.wait()
    again = blank()
    assert make_run(tmp_path).restore(again) == {"samples": 3, "step": 1} and is_state_of(again, 1)


def test_the_newest_save_is_reported_once_with_its_cost(tmp_path):
    checkpoints = make_run(tmp_path, **{"async": True})
    for step in (1, 2):
        checkpoints.save(step, make_tensors(step), {}, {}, metric=float(step))
    checkpoints.save(3, make_tensors(3), {}, {}, metric=float("nan"), final=True)
    logged = checkpoints.poll()
    assert [(one.step, one.metric, one.directory.name) for one in logged] == [
        (1, 1.0, "step-00000001"),
        (2, 2.0, "step-00000002"),
        (3, None, "step-00000003"),  # a loss that is no number is never the best
    ]
    assert all(0 < one.stall_s <= one.elapsed_s and one.num_bytes > 4_400_000 for one in logged)
    assert logged[2].stall_s == logged[2].elapsed_s and checkpoints.poll() == []


def test_the_same_step_is_saved_once(tmp_path):
    checkpoints = save_steps(tmp_path, 5)
    assert checkpoints.save(5, make_tensors(5), {}, {}, final=True) is False
    restored = make_run(tmp_path)
    restored.restore(blank())
    assert restored.save(5, make_tensors(5), {}, {}) is False and not restored.due(5)


def test_the_checkpoint_holds_all_that_is_needed_elsewhere(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    files = {"resolved.yaml": b"a: 1\n", "tokenizer/tokenizer.json": tmp_path / "tokenizer.json", "empty": b""}
    make_run(tmp_path).save(7, make_tensors(7), {"a": [1, {"b": None}]}, files, metric=1.5)
    found = Checkpoint.open(tmp_path / "checkpoints/step-00000007")
    assert found.read("tokenizer/tokenizer.json") == b"{}" and found.read("empty") == b""
    assert set(found.manifest.files) == {"trainer_state.json", "index.json", "rank-00000.bin", *files}
    manifest = found.manifest
    assert (manifest.run_id, manifest.step, manifest.world, manifest.metric) == ("run", 7, 1, 1.5)


def test_a_trainer_state_that_is_no_json_is_refused_before_anything_is_written(tmp_path):
    for trainer_state, error in (({"loss": float("nan")}, ValueError), ({"x": {1, 2}}, TypeError)):
        with pytest.raises(error):
            make_run(tmp_path).save(1, make_tensors(1), trainer_state, {})
    assert committed_steps(tmp_path / "checkpoints") == []


def test_due_follows_steps_pins_and_the_agreed_clock():
    config = {"every_steps": 10, "keep_steps": [0, 15]}
    checkpoints = make_run(Path("nowhere"), **config)
    assert [step for step in range(32) if checkpoints.due(step)] == [0, 10, 15, 20, 30]
    assert checkpoints.due(7, has_agreed=True) and not make_run(Path("nowhere")).due(10)


def test_the_clock_is_due_after_so_many_minutes_since_the_last_save(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    checkpoints, never = make_run(tmp_path, every_minutes=2), make_run(tmp_path, every_minutes=None)
    due = []
    for passed_s in (0, 119.9, 120, 500):
        clock[0] = 1000.0 + passed_s
        due.append(checkpoints.is_late)
    assert due == [False, False, True, True]
    checkpoints.save(1, make_tensors(1), {}, {})
    assert not checkpoints.is_late
    clock[0] = 1e9
    assert checkpoints.is_late and not never.is_late
    assert CheckpointConfig().every_minutes == 30, "a recipe that sets nothing saves every half hour"


def test_a_failure_in_the_background_of_one_process_surfaces_at_poll_and_the_step_can_be_retried(tmp_path, monkeypatch):
    checkpoints = save_steps(tmp_path, 1, **{"async": True})
    checkpoints.poll()

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("windlass.checkpoint.save.PieceWriter", fail)
        checkpoints.save(2, make_tensors(2), {}, {})
        while not checkpoints._has_failed:
            time.sleep(0.01)
    with pytest.raises(DiskFull, match="the disk is full"):
        checkpoints.poll()
    assert not checkpoints._has_failed and checkpoints.poll() == []
    assert checkpoints.save(2, make_tensors(2), {}, {}, final=True)
    assert committed_steps(tmp_path / "checkpoints") == [2, 1]


@pytest.mark.parametrize("surface", ["wait", "save"])
def test_a_failure_in_the_background_of_one_rank_is_the_same_error_on_all(ranks, tmp_path, surface):
    """Rank 1's disk fills up while it writes. Nobody hangs, nobody goes on unaware, the last committed step stays."""
    found = ranks.run(2, cases.fail_in_background, tmp_path / "checkpoints", surface)
    assert found[0] == found[1]
    kind, text, retried = found[0]
    assert kind == DiskFull.__name__ and "the disk is full" in text and str(tmp_path / "checkpoints") in text
    assert retried  # the step may be tried again, and then it is committed
    assert committed_steps(tmp_path / "checkpoints") == [2, 1]
    assert not list((tmp_path / "checkpoints").glob(".tmp*"))


def test_many_asynchronous_saves_beside_collectives_of_training(ranks, tmp_path):
    """The save's group is its own: the training's all-reduces go on meanwhile and their results stay right."""
    assert ranks.run(2, cases.save_while_training, tmp_path / "checkpoints") == [True, True]
    assert committed_steps(tmp_path / "checkpoints") == [8, 7]
    for step in (7, 8):
        assert verify_checkpoint(tmp_path / f"checkpoints/step-{step:08d}") == []


def test_the_second_save_uses_the_plan_of_the_first(ranks, tmp_path):
    """Plans made, after each of four saves: none where no rank holds other parts."""
    assert ranks.run(2, cases.saves_in_turn, tmp_path / "checkpoints") == [[1, 1, 2, 3]] * 2
    for step in (1, 2, 3, 4):
        assert verify_checkpoint(tmp_path / f"checkpoints/step-{step:08d}") == []
    one, two = (Checkpoint.open(tmp_path / f"checkpoints/step-{step:08d}") for step in (1, 2))
    assert read_tensor_index(one) == read_tensor_index(two) and one.manifest.token != two.manifest.token


def test_a_save_that_fails_leaves_its_plan_to_the_next(ranks, tmp_path):
    """The saves after failed ones are whole."""
    made = ranks.run(2, cases.saves_between_failures, tmp_path / "checkpoints")
    assert made == [[1, 1, 1, 1, 2, 2]] * 2, "once, and once more where a rank holds a tensor more"
    assert committed_steps(tmp_path / "checkpoints") == [6, 4]
    assert all(verify_checkpoint(tmp_path / f"checkpoints/step-{step:08d}") == [] for step in (4, 6))
    assert "only" in read_tensor_index(Checkpoint.open(tmp_path / "checkpoints/step-00000006"))
