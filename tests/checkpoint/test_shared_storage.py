import pytest

from tests.checkpoint import cases
from windlass.checkpoint import shared_storage as probe
from windlass.checkpoint.shared_storage import probe_shared_storage
from windlass.errors import UserError


def test_shared_storage_passes_and_nothing_is_left(ranks, tmp_path):
    assert ranks.run(3, cases.probe_directories, [tmp_path / "run"] * 3) == [""] * 3
    assert list((tmp_path / "run").iterdir()) == []


def test_a_rank_with_a_directory_of_its_own_is_named_with_its_host_on_all_ranks(ranks, tmp_path):
    places = [tmp_path / "run", tmp_path / "other", tmp_path / "run", tmp_path / "third"]
    found = ranks.run(4, cases.probe_directories, places)
    assert len(set(found)) == 1
    assert (
        f"{tmp_path / 'run'} is not the same storage on all ranks: host node-1 (rank 1); host node-3 (rank 3)"
        in found[0]
    )
    assert "rank 0 on host node-0" in found[0] and "every host mounts" in found[0]
    assert not list(tmp_path.rglob(".probe*"))


def test_a_rank_that_cannot_write_is_the_same_error_on_all_ranks(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    found = ranks.run(2, cases.probe_directories, [tmp_path / "run", tmp_path / "file"])
    assert len(set(found)) == 1 and f"cannot write to {tmp_path / 'file'}: File exists" in found[0]


def test_one_process_needs_a_directory_that_takes_writes(tmp_path, monkeypatch):
    probe_shared_storage(tmp_path / "new", 0, 1, None)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="File exists"):
        probe_shared_storage(tmp_path / "file", 0, 1, None)


def test_storage_that_is_late_is_waited_for(tmp_path, monkeypatch):
    answers = iter([False, False, True])
    monkeypatch.setattr(probe.Path, "exists", lambda path: next(answers))
    assert probe._hidden([tmp_path]) == []
