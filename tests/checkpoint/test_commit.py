import errno
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.checkpoint.cases import blank, is_state_of, make_run, make_tensors, save_steps
from windlass.checkpoint import commit, save
from windlass.checkpoint.commit import (
    DiskFull,
    Draft,
    check_takes_steps,
    committed_steps,
    delete_checkpoint,
    named_errors,
    new_token,
    quarantine,
    sweep,
)
from windlass.checkpoint.keep import list_checkpoints, size_problems
from windlass.checkpoint.verify import Checkpoint, verify_checkpoint
from windlass.errors import EXIT_UNAVAILABLE, BadCheckpoint, Unavailable, UserError

MIB = 1 << 20


def names(directory):
    return sorted(entry.name for entry in directory.iterdir())


def test_a_save_leaves_the_committed_directory_and_nothing_else(tmp_path):
    save_steps(tmp_path, 100)
    assert names(tmp_path / "checkpoints") == ["step-00000100"]
    files = names(tmp_path / "checkpoints" / "step-00000100")
    assert files == ["MANIFEST", "index.json", "rank-00000.bin", "resolved.yaml", "tokenizer", "trainer_state.json"]


def test_everything_is_on_disk_before_the_rename_and_the_parent_after_it(tmp_path, monkeypatch):
    events = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", lambda *a: (events.append("RENAME"), real_rename(*a)))
    save_steps(tmp_path, 100)
    before, after = events[: events.index("RENAME")], events[events.index("RENAME") + 1 :]
    draft = next(name for name in before if name.startswith(".tmp-00000100-"))
    assert {
        "rank-00000.bin",
        "index.json",
        "trainer_state.json",
        "resolved.yaml",
        "vocab.txt",
        "tokenizer",
        draft,
    } <= set(before)
    assert before.index("rank-00000.bin") < before.index("MANIFEST") < before.index(draft)
    assert before.index("index.json") < before.index("MANIFEST")
    assert after == ["checkpoints"]


def test_a_name_is_on_disk_before_what_it_named_is_deleted(tmp_path, monkeypatch):
    """Or after a power cut step-N may be there with half of its files."""
    events = []
    real_fsync, real_rename, real_rmtree = commit.fsync_directory, Path.rename, shutil.rmtree

    def rename(path, target):
        events.append(f"{path.name} away")
        return real_rename(path, target)

    monkeypatch.setattr(
        commit, "fsync_directory", lambda path: (events.append(f"{path.name} on disk"), real_fsync(path))
    )
    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **more: (events.append("deleted"), real_rmtree(path, **more)))
    save_steps(tmp_path, 100, 200)
    events.clear()
    delete_checkpoint(tmp_path / "checkpoints", 100, "run")
    assert events == ["step-00000100 away", "checkpoints on disk", "deleted"]
    events.clear()
    quarantine(tmp_path / "checkpoints" / "step-00000200")
    assert events == ["step-00000200 away", "checkpoints on disk"]


def test_a_committed_step_is_never_overwritten(tmp_path):
    save_steps(tmp_path, 100)
    kept = (tmp_path / "checkpoints/step-00000100/rank-00000.bin").read_bytes()
    with pytest.raises(UserError, match="step-00000100 is committed already") as caught:
        save_steps(tmp_path, 100)
    assert "one run" in caught.value.change
    draft = Draft(tmp_path / "checkpoints", 100, new_token("run"))
    draft.directory.mkdir()
    with pytest.raises(UserError, match="is committed already"):  # somebody was faster between create and commit
        draft.commit("run", 1, None, {})
    assert (tmp_path / "checkpoints/step-00000100/rank-00000.bin").read_bytes() == kept


def test_too_little_space_is_named_before_anything_is_written_and_the_last_step_stays(tmp_path, monkeypatch):
    checkpoints = save_steps(tmp_path, 100)
    need = Checkpoint.open(tmp_path / "checkpoints/step-00000100").manifest.num_bytes
    real = os.statvfs(tmp_path)
    full = SimpleNamespace(f_bavail=int(need * 1.05) // real.f_frsize, f_frsize=real.f_frsize, f_files=0)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(DiskFull) as caught:
        checkpoints.save(200, make_tensors(200), {}, {})
    assert "needs 4.2 MiB, 4.4 MiB are free in " + str(tmp_path / "checkpoints") in caught.value.given
    assert "1.1 times" in caught.value.rule and "keep_last" in caught.value.change
    assert names(tmp_path / "checkpoints") == ["step-00000100"]
    monkeypatch.undo()
    assert checkpoints.save(200, make_tensors(200), {}, {})  # when there is space again, the same step is saved


@pytest.fixture
def small_disk(tmp_path):
    where = tmp_path / "small"
    where.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(where)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no small file system: mount says {done.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", str(where)], check=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_fills_up_while_we_write_is_named_and_our_rubbish_is_removed(small_disk, monkeypatch, asynchronous):
    checkpoints = save_steps(small_disk, 100, **{"async": asynchronous})
    (small_disk / "others").write_bytes(b"x" * (3 * MIB))
    monkeypatch.setattr(save, "check_space", lambda *a: None)  # as if the space went away after the check
    with pytest.raises(DiskFull) as caught:
        checkpoints.save(200, make_tensors(200), {}, {})
        checkpoints.wait()
    assert "needs 4.2 MiB, " in caught.value.given and str(small_disk) in caught.value.given
    assert names(small_disk / "checkpoints") == ["step-00000100"]
    state = blank()
    assert make_run(small_disk).restore(state) == {"samples": 1000, "step": 100} and is_state_of(state, 100)


def test_a_small_disk_is_refused_before_writing(small_disk):
    checkpoints = save_steps(small_disk, 100)
    (small_disk / "others").write_bytes(b"x" * (3 * MIB))
    with pytest.raises(DiskFull, match=r"needs 4.2 MiB, [12]\.\d MiB are free"):
        checkpoints.save(200, make_tensors(200), {}, {})


def test_a_disk_without_inodes_is_not_said_to_have_space(tmp_path, monkeypatch):
    found = SimpleNamespace(f_bavail=1000, f_frsize=4096, f_files=64, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    with pytest.raises(DiskFull) as caught, named_errors(tmp_path, 100):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert "no inodes are free" in caught.value.given and "delete files" in caught.value.change
    found.f_favail = 1
    with pytest.raises(DiskFull, match=r"needs 100 B, 3.9 MiB are free"), named_errors(tmp_path, 100):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_where_steps_go_is_refused_before_training(tmp_path, monkeypatch):
    where = tmp_path / "checkpoints"
    check_takes_steps(where)
    where.mkdir()
    check_takes_steps(where)
    (where / "step-00000100").write_text("")
    with pytest.raises(UserError) as caught:
        check_takes_steps(where)
    assert caught.value.given == f"{where}/step-00000100 is a file" and caught.value.change == "move the file away"
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(UserError, match="this user cannot write to"):
            check_takes_steps(where)
    (where / "step-00000100").unlink()
    where.rmdir()
    where.write_text("")
    for look in (committed_steps, check_takes_steps):
        with pytest.raises(UserError, match="checkpoints is a file"):
            look(where)


def test_storage_that_refuses_writes_is_named_with_the_path(tmp_path):
    refused = pytest.raises(UserError, match=r"cannot write to /there/f: Read-only file system")
    with refused as caught, named_errors(tmp_path, 1):
        raise OSError(errno.EROFS, "Read-only file system", "/there/f")
    assert "last committed checkpoint stays" in caught.value.rule


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_storage_that_fails_now_is_a_failure_that_a_retry_may_not_meet(tmp_path, number):
    with pytest.raises(Unavailable, match=r"cannot write to /there/f: ") as caught, named_errors(tmp_path, 1):
        raise OSError(number, os.strerror(number), "/there/f")
    assert caught.value.code == EXIT_UNAVAILABLE


def test_a_run_directory_that_is_a_file_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*/checkpoints: File exists"):
        save_steps(tmp_path, 1)


def test_sweep_takes_our_own_drafts_and_leaves_everything_else(tmp_path):
    save_steps(tmp_path, 100)
    checkpoints = tmp_path / "checkpoints"
    ours, theirs = Draft(checkpoints, 200, new_token("run")), Draft(checkpoints, 200, new_token("another run"))
    for draft in (ours, theirs):
        draft.create()
        (draft.directory / "rank-00000.bin").write_bytes(b"half")
    for other in (".tmp-mine", "notes", "step-00000050.corrupt"):
        (checkpoints / other).mkdir()
    assert sweep(checkpoints, "run") == 1
    assert not ours.directory.exists()
    assert {theirs.directory.name, ".tmp-mine", "notes", "step-00000050.corrupt", "step-00000100"} == set(
        names(checkpoints)
    )


def test_restore_sweeps_once_and_says_so(tmp_path):
    save_steps(tmp_path, 100)
    Draft(tmp_path / "checkpoints", 200, new_token("run")).create()
    logged = []
    make_run(tmp_path, logged).restore(blank())
    assert len(logged) == 1 and "removed 1 unfinished save of this run" in logged[0]


def test_a_kill_while_deleting_leaves_no_half_of_a_committed_checkpoint(tmp_path, monkeypatch):
    save_steps(tmp_path, 100, 200)
    checkpoints = tmp_path / "checkpoints"
    monkeypatch.setattr("shutil.rmtree", lambda *a, **k: None)  # killed before the first file is gone
    delete_checkpoint(checkpoints, 100, "run")
    monkeypatch.undo()
    assert committed_steps(checkpoints) == [200]
    assert sweep(checkpoints, "run") == 1


def test_quarantine_renames_and_numbers_and_deletes_nothing(tmp_path):
    for _ in range(3):
        save_steps(tmp_path, 100)
        quarantine(tmp_path / "checkpoints/step-00000100")
    assert names(tmp_path / "checkpoints") == [f"step-00000100.corrupt{end}" for end in ("", "-1", "-2")]


def test_only_exact_names_of_directories_and_links_count_as_steps(tmp_path):
    for name in (
        "step-00000007",
        "step-0000000008",
        "step-9",
        "step-00000010.corrupt",
        "xstep-00000011",
        "step-00000012 ",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000013").write_text("")
    (tmp_path / "step-00000014").symlink_to(tmp_path / "step-00000007")
    (tmp_path / "step-00000015").symlink_to(tmp_path / "nowhere")
    assert committed_steps(tmp_path) == [15, 14, 7]
    assert committed_steps(tmp_path / "nowhere") == []


def test_a_directory_copied_elsewhere_is_whole(tmp_path):
    import shutil

    save_steps(tmp_path, 100)
    shutil.copytree(tmp_path / "checkpoints/step-00000100", tmp_path / "usb-stick")
    assert verify_checkpoint(tmp_path / "usb-stick") == [] and size_problems(tmp_path / "usb-stick") == []
    assert Checkpoint.open(tmp_path / "usb-stick").read("resolved.yaml") == b"seed: 1\n"
    with pytest.raises(BadCheckpoint, match="has no file 'other'"):
        Checkpoint.open(tmp_path / "usb-stick").read("other")


def move_and_link(run, *steps):
    """Steps moved to other storage, with links in their places -> that storage."""
    bulk = run.parent / "bulk"
    bulk.mkdir()
    for step in steps:
        (run / f"checkpoints/step-{step:08d}").rename(bulk / f"{step}")
        (run / f"checkpoints/step-{step:08d}").symlink_to(bulk / f"{step}")
    return bulk


def test_steps_that_are_links_are_restored_and_pruned_without_what_they_lead_to(tmp_path):
    save_steps(tmp_path / "run", 100, 200)
    bulk = move_and_link(tmp_path / "run", 100, 200)
    state = blank()
    checkpoints = make_run(tmp_path / "run", keep_last=1)
    assert checkpoints.restore(state) == {"samples": 2000, "step": 200} and is_state_of(state, 200)
    assert [row.problem for row in list_checkpoints(tmp_path / "run", verified=True)] == ["", ""]
    assert checkpoints.save(300, make_tensors(300), {}, {})
    assert names(tmp_path / "run/checkpoints") == ["step-00000300"], "the links are deleted"
    assert names(bulk) == ["100", "200"] and verify_checkpoint(bulk / "100") == verify_checkpoint(bulk / "200") == []


def test_a_link_to_a_bad_checkpoint_is_put_aside_and_its_files_stay(tmp_path):
    save_steps(tmp_path / "run", 100, 200)
    bulk = move_and_link(tmp_path / "run", 200)
    (bulk / "200/rank-00000.bin").write_bytes(b"")
    logged, state = [], blank()
    assert make_run(tmp_path / "run", logged).restore(state)["step"] == 100 and is_state_of(state, 100)
    assert names(tmp_path / "run/checkpoints") == ["step-00000100", "step-00000200.corrupt"]
    assert "rank-00000.bin: size" in logged[0] and names(bulk) == ["200"]


def test_a_link_that_leads_nowhere_is_refused_by_name_and_left_alone(tmp_path):
    save_steps(tmp_path / "run", 100, 200)
    bulk = move_and_link(tmp_path / "run", 200)
    (bulk / "200").rename(bulk / "elsewhere")
    logged, link = [], tmp_path / "run/checkpoints/step-00000200"
    with pytest.raises(UserError) as caught:
        make_run(tmp_path / "run", logged).restore(blank())
    assert not isinstance(caught.value, BadCheckpoint) and logged == []
    assert caught.value.given == f"{link} is a link to {bulk}/200, which is no directory here"
    assert "mount the storage" in caught.value.change and link.is_symlink()
    assert list_checkpoints(tmp_path / "run")[1].problem == caught.value.given
    with pytest.raises(UserError, match="step-00000200 is committed already"):
        make_run(tmp_path / "run").save(200, make_tensors(200), {}, {})


def test_a_directory_of_steps_that_is_a_link_is_followed_or_refused_but_never_begun_anew(tmp_path):
    save_steps(tmp_path / "run", 100)
    (tmp_path / "run/checkpoints").rename(tmp_path / "bulk")
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "bulk")
    assert make_run(tmp_path / "run").restore(blank())["step"] == 100
    (tmp_path / "bulk").rename(tmp_path / "unmounted")
    with pytest.raises(UserError) as caught:
        make_run(tmp_path / "run").restore(blank())
    assert caught.value.given == f"{tmp_path}/run/checkpoints is a link to {tmp_path}/bulk, which is no directory here"
    assert "mount the storage" in caught.value.change
