"""A directory changes hands whole, one holder at a time, and nothing foreign is ever replaced."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

from windlass.data.prepare.directory import (
    check_apart,
    check_is_directory,
    check_room,
    check_writable,
    locked_to_prepare,
    replaced,
)
from windlass.data.prepare.manifest import Prepared
from windlass.errors import UserError


def fill(directory, word):
    """What a preparation leaves, as far as a place cares."""
    Prepared(directory, word, "", {}, "", 1, 0, {}, {}).save(directory)


def word_in(directory):
    from windlass.data.prepare.manifest import load_prepared

    return load_prepared(directory).fingerprint


def test_the_new_takes_the_old_ones_place(tmp_path):
    for word in ("first", "second"):
        with locked_to_prepare(tmp_path / "data", print), replaced(tmp_path / "data") as temporary:
            fill(temporary, word)
        assert word_in(tmp_path / "data") == word
        assert sorted(os.listdir(tmp_path)) == [".data.lock", "data"]


def test_an_error_leaves_the_old_and_nothing_else(tmp_path):
    with replaced(tmp_path / "data") as temporary:
        fill(temporary, "old")
    with pytest.raises(ZeroDivisionError), replaced(tmp_path / "data") as temporary:
        fill(temporary, "new")
        raise ZeroDivisionError
    assert word_in(tmp_path / "data") == "old" and os.listdir(tmp_path) == ["data"]


def test_an_empty_directory_is_taken_and_a_foreign_one_refused(tmp_path):
    (tmp_path / "data").mkdir()
    with replaced(tmp_path / "data") as temporary:
        fill(temporary, "mine")
    (tmp_path / "data" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError) as caught, replaced(tmp_path / "data"):
        pass
    assert "holds what windlass did not prepare: thesis.tex" in caught.value.given
    assert (tmp_path / "data" / "thesis.tex").read_text() == "years of work" and word_in(tmp_path / "data") == "mine"


def test_too_little_room_is_reported_before_anything_is_encoded(tmp_path):
    check_room(tmp_path, 1000, keeps_ids=True)
    with pytest.raises(UserError) as caught:
        check_room(tmp_path, 1 << 60, keeps_ids=True)
    assert "are free on the disk of" in caught.value.given and "free space" in caught.value.change
    assert "and ids 4 besides until all are written: at least 786432.0 TiB" in caught.value.rule
    text_bytes = 2 * shutil.disk_usage(tmp_path).free
    check_room(tmp_path, text_bytes, keeps_ids=False)  # at 8 bytes of text per token, half of what is free
    with pytest.raises(UserError, match=r"or more: at least 262144\.0 TiB here"):
        check_room(tmp_path, 1 << 60, keeps_ids=False)


def test_a_full_disk_is_named(tmp_path):
    with pytest.raises(UserError) as caught, replaced(tmp_path / "data") as temporary:
        (temporary / "x").write_bytes(bytes(2048))
        raise OSError(errno.ENOSPC, "No space left on device")
    assert "the disk of" in caught.value.given and "full after 2.0 KiB" in caught.value.given
    assert os.listdir(tmp_path) == []
    with pytest.raises(PermissionError), replaced(tmp_path / "data"):
        raise PermissionError("another error stays what it is")


def test_a_file_or_a_place_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for path, says in ((tmp_path / "file", "is a file"), (tmp_path / "file" / "data", "cannot be made: ")):
        with pytest.raises(UserError, match=says):
            check_is_directory(path)
            check_writable(path)
    check_writable(tmp_path / "a" / "b" / "data")
    assert not (tmp_path / "a").exists(), "a refused recipe leaves nothing"


def test_an_unwritable_parent_is_named(tmp_path):
    (tmp_path / ".data.lock").mkdir()  # as unwritable as it gets, also for root
    with pytest.raises(UserError, match="cannot be written"), locked_to_prepare(tmp_path / "data", print):
        pass


def test_leftovers_of_a_killed_preparation_are_swept_and_an_interrupted_swap_is_undone(tmp_path):
    for name in (".data.preparing", ".data.old"):
        (tmp_path / name).mkdir()
        fill(tmp_path / name, name)
    with locked_to_prepare(tmp_path / "data", print):
        assert word_in(tmp_path / "data") == ".data.old"
    assert sorted(os.listdir(tmp_path)) == [".data.lock", "data"]
    (tmp_path / ".data.old").mkdir()
    with locked_to_prepare(tmp_path / "data", print):
        assert sorted(os.listdir(tmp_path)) == [".data.lock", "data"]


def test_the_second_waits_and_says_so(tmp_path):
    said, entered = [], threading.Event()

    def second():
        with locked_to_prepare(tmp_path / "data", said.append):
            entered.set()

    with locked_to_prepare(tmp_path / "data", said.append):
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.2)
        assert said == [f"another process is preparing {tmp_path}/data: waiting for it"]
    thread.join(10)
    assert entered.is_set()


def refused():
    raise UserError("given", "rule", "change")


def test_a_refusal_leaves_nothing_where_nothing_was(tmp_path):
    for name in ("a/b/data", "data"):
        with pytest.raises(UserError, match="given"), locked_to_prepare(tmp_path / name, print):
            refused()
        assert os.listdir(tmp_path) == []
    (tmp_path / "data").mkdir()
    with pytest.raises(UserError, match="given"), locked_to_prepare(tmp_path / "data", print):
        refused()
    assert sorted(os.listdir(tmp_path)) == [".data.lock", "data"], "another preparation may wait for it"
    (tmp_path / "data").rmdir()
    with pytest.raises(UserError, match="given"), locked_to_prepare(tmp_path / "data", print):
        (tmp_path / ".data.work").mkdir()
        refused()
    assert sorted(os.listdir(tmp_path)) == [".data.lock", ".data.work"], "what a mended recipe goes on with"


def comes(condition):
    """Whether it holds in the end."""
    for _ in range(3000):
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_who_waited_for_one_that_was_refused_keeps_the_next_out(tmp_path):
    """The refused one removes the lock file that the second waits for."""
    said, order, second_may_end = [], [], threading.Event()

    def prepares(name, until):
        with locked_to_prepare(tmp_path / "data", said.append):
            order.append(name)
            assert until.wait(10)

    second = threading.Thread(target=prepares, args=("second", second_may_end))
    third = threading.Thread(target=prepares, args=("third", second_may_end))
    with pytest.raises(UserError, match="given"), locked_to_prepare(tmp_path / "data", print):
        second.start()
        assert comes(lambda: said)
        refused()
    assert comes(lambda: order)
    third.start()
    assert comes(lambda: len(said) == 2) and order == ["second"], "the third waits for it"
    second_may_end.set()
    second.join(10)
    third.join(10)
    assert order == ["second", "third"]


def test_the_lock_of_a_killed_holder_is_free(tmp_path):
    code = (
        "import os, pathlib, signal, sys\n"
        "from windlass.data.prepare.directory import locked_to_prepare\n"
        "with locked_to_prepare(pathlib.Path(sys.argv[1]), print):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "data")]).returncode == -9
    said = []
    with locked_to_prepare(tmp_path / "data", said.append):
        assert said == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("windlass.data.prepare.directory.fcntl.flock", refuse)
    with pytest.raises(UserError) as caught, locked_to_prepare(tmp_path / "data", print):
        pass
    assert f"{tmp_path}/.data.lock cannot be locked: {os.strerror(number)}" in caught.value.given
    assert "local disk" in caught.value.change


def test_data_is_not_among_its_sources(tmp_path, monkeypatch):
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for directory in ("texts", "texts/data", "texts/deep/data", "other/../texts/data"):
        with pytest.raises(UserError) as caught:
            check_apart(tmp_path / directory, ["elsewhere.txt", "texts"])
        assert "is inside the source texts" in caught.value.given and "texts/*.jsonl" in caught.value.change
    for directory in ("data", "texts-data", "texts/.prepared/data"):
        check_apart(tmp_path / directory, ["texts", "texts/a.txt", "s3://texts", "nowhere"])
