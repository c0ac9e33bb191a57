"""Encoding in processes is encoding in one process: same ids, same order; and a dead worker is an error."""

import os
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest

from tests.data.conftest import make_text
from windlass.data.tokenize import pool as room
from windlass.data.tokenize.tokenizer import open_tokenizer, save_trained, train_tokenizer
from windlass.errors import UserError

TEXTS = [make_text(1 + 37 * number % 800, number) for number in range(120)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("encode") / "tokenizer"
    save_trained(train_tokenizer(TEXTS[:5], 320), path)
    return path


def plain(texts, directory):
    tokenizer, eos_id = open_tokenizer(directory)
    return [number for text in texts for number in [*tokenizer.encode(text).ids, eos_id]]


def test_documents_come_in_order_each_with_its_eos(directory):
    assert np.concatenate(list(room.encode(TEXTS, 1, directory, 2))).tolist() == plain(TEXTS, directory)


def test_workers_give_what_one_process_gives(directory, monkeypatch):
    monkeypatch.setattr(room, "BATCH_CHARS", 2000)
    with room.Workers(2, room.Encoder, directory) as workers:
        found = np.concatenate(list(workers.map(room.piece_batches(TEXTS))))
    assert found.dtype == np.int32 and found.tolist() == plain(TEXTS, directory)


def test_workers_are_as_many_as_are_worth_their_start():
    mib = 1 << 20
    found = [room.num_text_workers(size, 8) for size in (0, mib, mib + 1, 4 * mib, 4 * mib + 1, 100 * mib)]
    assert found == [0, 0, 1, 1, 2, 8]


def test_large_text_is_encoded_as_small_text_is(directory):
    found = np.concatenate(list(room.encode(TEXTS[:3], 5 << 20, directory, 2)))
    assert found.tolist() == plain(TEXTS[:3], directory)


@pytest.mark.parametrize(
    "text",
    ["", "short", "line\n" * 500, "x" * 2500, "no newline " * 300, "\n" * 2500, "a\r\nb" * 600, "word\n\n" * 400],
)
def test_pieces_are_the_document_and_small(monkeypatch, text):
    monkeypatch.setattr(room, "PIECE_CHARS", 1000)
    cut = list(room.document_pieces(text))
    assert "".join(piece for piece, _ in cut) == text and max(len(piece) for piece, _ in cut) <= 1000
    assert [ends for _, ends in cut] == [room.GOES_ON] * (len(cut) - 1) + [room.ENDS]
    assert all(piece for piece, _ in cut[:-1])


def test_a_long_document_cut_at_newlines_has_the_ids_of_the_whole(directory, monkeypatch):
    text = "\n".join(make_text(8, seed).replace("\n", " ").strip() + "." for seed in range(400))
    monkeypatch.setattr(room, "PIECE_CHARS", 1000)
    assert len(list(room.document_pieces(text))) > 5
    assert np.concatenate(list(room.encode([text, "b"], 1, directory, 1))).tolist() == plain([text, "b"], directory)


def test_reading_goes_only_as_far_ahead_as_workers_need(directory, monkeypatch):
    monkeypatch.setattr(room, "BATCH_CHARS", 10)
    taken = []

    def texts():
        for number in range(100):
            taken.append(number)
            yield "some text to encode"

    with room.Workers(1, room.Encoder, directory) as workers:
        results = workers.map(room.piece_batches(texts()))
        next(results)
        assert len(taken) <= room.BATCHES_AHEAD + 1
        results.close()


def test_a_dead_worker_is_an_error_with_its_exit_code(directory, monkeypatch):
    monkeypatch.setattr(room, "BATCH_CHARS", 2000)
    with pytest.raises(RuntimeError, match="died, exit code -9"), room.Workers(2, room.Encoder, directory) as workers:
        workers._processes[0].kill()
        list(workers.map(room.piece_batches(TEXTS)))


def test_workers_need_no_main_guard_and_leave_nothing_behind(directory, tmp_path):
    """multiprocessing's spawn would run this script again in every child. A worker sees what the script added to its path, and
    no module of the working directory."""
    for name, line in (("work/pickle.py", "raise SystemExit('shadowed')"), ("added/sitecustomize.py", "print('seen')")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(f"import sys; sys.stdout = sys.stderr; {line}; sys.stdout = sys.__stdout__")
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from windlass.data.tokenize.pool import Encoder, Workers\n"
        "print('once')\n"
        "with Workers(1, Encoder, pathlib.Path(sys.argv[1])) as workers:\n"
        "    print(sum(len(ids) for ids in workers.map([[('some text', -1)]])))\n"
    )
    command = [sys.executable, str(script), str(directory), str(tmp_path / "added")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "work")
    assert (done.stdout, done.stderr) == (f"once\n{len(plain(['some text'], directory))}\n", "seen\n")


class Squared(NamedTuple):
    number: int

    def __call__(self, kept):
        kept["calls"] = kept.get("calls", 0) + 1
        if self.number < 0:
            raise UserError("given", "rule", "change")
        return self.number**2, os.getpid(), kept["calls"]


def test_tasks_are_run_here_or_by_the_same_workers_and_answered_in_order(monkeypatch):
    monkeypatch.setattr(room, "BYTES_PER_WORKER", 1 << 20)
    tasks = list(map(Squared, range(20)))
    with room.TaskRunner(2) as runner:
        here = list(runner.map(tasks, 1 << 20))
        assert [pid for _, pid, _ in here] == [os.getpid()] * 20 and here[-1][2] == 20
        there = [list(runner.map(tasks, 9 << 20)) for _ in range(2)]
        assert [[square for square, *_ in one] for one in there] == [[number**2 for number in range(20)]] * 2
        pids = {pid for one in there for _, pid, _ in one}
        assert 1 <= len(pids) <= 2 and os.getpid() not in pids
        assert sum(max(calls for _, pid, calls in there[0] + there[1] if pid == one) for one in pids) == 40
        with pytest.raises(UserError):
            list(runner.map([*tasks, Squared(-1)], 9 << 20))
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
