import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.checkpoint import cases
from tests.checkpoint.cases import blank, is_state_of, make_run, make_tensors, save_steps
from windlass.checkpoint.commit import quarantine
from windlass.checkpoint.manifest import Problem, is_rank_name
from windlass.checkpoint.verify import Checkpoint
from windlass.errors import BadCheckpoint, UserError


def damage(directory):
    path = directory / "rank-00000.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_run_that_never_committed_starts_at_nothing(tmp_path):
    assert make_run(tmp_path).restore(blank()) is None
    (tmp_path / "checkpoints").mkdir()
    assert make_run(tmp_path).restore(blank()) is None


def test_the_newest_whole_step_is_used_and_each_bad_one_gets_its_sentence(tmp_path):
    save_steps(tmp_path, 100, 200, 300)
    for step in (200, 300):
        damage(tmp_path / f"checkpoints/step-{step:08d}")
    logged, state = [], blank()
    assert make_run(tmp_path, logged).restore(state) == {"samples": 1000, "step": 100}
    assert is_state_of(state, 100)
    assert names(tmp_path) == ["step-00000100", "step-00000200.corrupt", "step-00000300.corrupt"]
    assert [text.split("It is now ")[1] for text in logged] == [
        f"step-00000{step}.corrupt; the next older one is tried." for step in (300, 200)
    ]
    assert "rank-00000.bin: hash differs in bytes" in logged[0] and "written" in logged[0]


def test_when_all_are_bad_it_is_an_error_now_and_at_the_next_start_and_no_fresh_start(tmp_path):
    save_steps(tmp_path, 100, 200)
    damage(tmp_path / "checkpoints/step-00000100")
    damage(tmp_path / "checkpoints/step-00000200")
    for _ in range(2):
        with pytest.raises(BadCheckpoint) as caught:
            make_run(tmp_path).restore(blank())
        assert "only step-00000100.corrupt, step-00000200.corrupt" in caught.value.given
        assert "not started over silently" in caught.value.rule and "step 0" in caught.value.change


def test_the_step_that_was_put_aside_can_be_saved_again(tmp_path):
    save_steps(tmp_path, 100, 200)
    damage(tmp_path / "checkpoints/step-00000200")
    checkpoints = make_run(tmp_path)
    state = blank()
    checkpoints.restore(state)
    assert checkpoints.save(200, state, {}, {})
    assert names(tmp_path) == ["step-00000100", "step-00000200", "step-00000200.corrupt"]


@pytest.mark.parametrize(
    "change, given, advice",
    [
        (lambda t: t.update({"model.more": torch.zeros(2)}), "has no tensor model.more", "resolved.yaml"),
        (lambda t: t.pop("model.bias"), "also holds model.bias", "weights only"),
        (lambda t: t.update({"model.bias": torch.zeros(8, dtype=torch.bfloat16)}), "model.bias has shape [7]", "model"),
        (lambda t: t.update({"model.bias": torch.zeros(7)}), "model.bias is torch.bfloat16", "weights only"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_and_the_checkpoint_stays_as_it_is(tmp_path, change, given, advice):
    save_steps(tmp_path, 100)
    state = blank()
    change(state)
    with pytest.raises(UserError) as caught:
        make_run(tmp_path).restore(state)
    assert given in caught.value.given and advice in caught.value.change
    assert not isinstance(caught.value, BadCheckpoint) and names(tmp_path) == ["step-00000100"]


def test_many_missing_tensors_are_counted_and_five_are_named(tmp_path):
    save_steps(tmp_path, 100)
    with pytest.raises(UserError) as caught:
        make_run(tmp_path).restore({f"x{number}": torch.zeros(1) for number in range(9)})
    assert "x0, x1, x2, x3, x4 and 4 more" in caught.value.given and "9 of 9" in caught.value.rule


@pytest.mark.parametrize("path", ["run", "run/checkpoints", "run/checkpoints/step-00000200", "usb"])
def test_a_run_its_checkpoints_or_one_checkpoint_anywhere_can_be_started_from(tmp_path, path):
    save_steps(tmp_path / "run", 100, 200)
    shutil.copytree(tmp_path / "run/checkpoints/step-00000200", tmp_path / "usb")
    state = blank()
    assert make_run(tmp_path / "new").restore_from(tmp_path / path, state) == {"samples": 2000, "step": 200}
    assert is_state_of(state, 200)


def test_an_older_step_of_a_run_can_be_started_from(tmp_path):
    save_steps(tmp_path / "run", 100, 200)
    state = blank()
    found = make_run(tmp_path / "new").restore_from(tmp_path / "run/checkpoints/step-00000100", state)
    assert found["step"] == 100 and is_state_of(state, 100)


def test_weights_leave_the_optimizer_and_convert_the_dtype(tmp_path):
    save_steps(tmp_path / "run", 100)
    weights = {name: tensor.double() for name, tensor in blank().items() if name.startswith("model.")}
    make_run(tmp_path / "new").restore_from(tmp_path / "run", weights, what="weights")
    assert is_state_of({**blank(), **weights}, 100) is False  # the optimizer's are still blank
    assert all(torch.equal(tensor, make_tensors(100)[name].double()) for name, tensor in weights.items())
    with pytest.raises(UserError, match=r"has no tensor model\.more"):
        make_run(tmp_path / "new").restore_from(tmp_path / "run", {"model.more": torch.zeros(1)}, what="weights")
    with pytest.raises(UserError, match="start_what is 'half'") as caught:
        make_run(tmp_path / "new").restore_from(tmp_path / "run", weights, what="half")
    assert "weights, all" in caught.value.rule


def test_starting_from_a_run_whose_newest_is_bad_uses_the_older_and_renames_nothing(tmp_path):
    save_steps(tmp_path / "run", 100, 200)
    damage(tmp_path / "run/checkpoints/step-00000200")
    logged, state = [], blank()
    assert make_run(tmp_path / "new", logged).restore_from(tmp_path / "run", state)["step"] == 100
    assert is_state_of(state, 100) and names(tmp_path / "run") == ["step-00000100", "step-00000200"]
    assert "rank-00000.bin" in logged[0] and "step-00000100 is tried; nothing was renamed" in logged[0]


def test_starting_from_one_bad_checkpoint_is_an_error_that_names_the_file(tmp_path):
    save_steps(tmp_path / "run", 100, 200)
    damage(tmp_path / "run/checkpoints/step-00000200")
    with pytest.raises(BadCheckpoint, match=r"rank-00000\.bin"):
        make_run(tmp_path / "new").restore_from(tmp_path / "run/checkpoints/step-00000200", blank())


@pytest.mark.parametrize(
    "path, why",
    [
        ("nowhere", "does not exist"),
        ("file", "is a file"),
        ("empty", "holds nothing"),
        ("aside", "step-00000100.corrupt"),
        ("src", "holds main.py"),
    ],
)
def test_an_empty_or_wrong_path_is_an_error_and_no_fresh_start(tmp_path, path, why):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "src").mkdir()
    (tmp_path / "src/main.py").write_text("")
    save_steps(tmp_path / "made", 100)
    quarantine(tmp_path / "made/checkpoints/step-00000100")
    (tmp_path / "made/checkpoints").rename(tmp_path / "aside")
    with pytest.raises(UserError) as caught:
        make_run(tmp_path / "new").restore_from(tmp_path / path, blank())
    assert why in caught.value.given and str(tmp_path / path) in caught.value.given
    assert "committed checkpoints" in caught.value.rule and "checkpoint list" in caught.value.change


def test_one_bad_piece_on_one_rank_makes_all_ranks_use_the_older_step(ranks, tmp_path):
    """The bytes of rank 1 in a layout of 2: rank 0 reads none of them."""
    ranks.run(2, cases.save_values, tmp_path / "checkpoints", [100, 200])
    path = tmp_path / "checkpoints/step-00000200/rank-00001.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert ranks.run(2, cases.load_values, tmp_path / "checkpoints") == [(100, {100.0})] * 2
    assert names(tmp_path) == ["step-00000100", "step-00000200.corrupt"]


def test_a_file_that_one_rank_cannot_open_puts_nothing_aside(ranks, tmp_path):
    """Unshared storage looks like a missing file on one rank only; the checkpoint is good."""
    ranks.run(2, cases.save_values, tmp_path / "checkpoints", [100])
    errors = ranks.run(2, cases.load_while_one_cannot_open, tmp_path / "checkpoints")
    assert all("cannot be opened on" in error and "share" in error for error in errors)
    assert names(tmp_path) == ["step-00000100"]


def test_pipeline_ranks_with_different_tensors_restore_their_own(ranks, tmp_path):
    ranks.run(2, cases.save_stages, tmp_path / "checkpoints")
    assert ranks.run(2, cases.load_stages, tmp_path / "checkpoints") == [None, None]
    assert "also holds stage1" in ranks.run(1, cases.load_stages, tmp_path / "checkpoints")[0]


def test_a_manifest_that_may_not_be_read_is_not_put_aside(tmp_path, monkeypatch):
    save_steps(tmp_path, 100)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match="step-00000100/MANIFEST cannot be read: Permission denied") as caught:
        make_run(tmp_path).restore(blank())
    assert not isinstance(caught.value, BadCheckpoint) and "permissions" in caught.value.change
    assert names(tmp_path) == ["step-00000100"]


@pytest.mark.parametrize("hidden", ["tokenizer", "resolved.yaml"])
def test_what_may_not_be_listed_or_read_puts_no_checkpoint_aside(tmp_path, monkeypatch, hidden):
    """os.walk leaves out what it cannot list: its files would count as missing."""
    save_steps(tmp_path, 100)
    walk, reader = os.walk, Checkpoint.verify

    def walk_and_refuse(top, onerror=None, **options):
        if hidden == "tokenizer" and Path(top).name == "step-00000100":
            onerror(PermissionError(13, "Permission denied", f"{top}/tokenizer"))
        yield from walk(top, onerror=onerror, **options)

    def verify(checkpoint, name):
        problem = Problem(name, "unreadable", "Permission denied")
        return problem if hidden != "tokenizer" and not is_rank_name(name) else reader(checkpoint, name)

    monkeypatch.setattr(os, "walk", walk_and_refuse)
    monkeypatch.setattr(Checkpoint, "verify", verify)
    with pytest.raises(UserError, match="Permission denied") as caught:
        make_run(tmp_path).restore(blank())
    assert not isinstance(caught.value, BadCheckpoint) and "permissions" in caught.value.change
    assert names(tmp_path) == ["step-00000100"]
