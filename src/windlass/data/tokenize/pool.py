"""Documents -> token ids in a pool of processes, in order, with bounded memory.

The parent only moves bytes. Long documents are cut into pieces of at most 1 MiB after a newline between two characters that are
not spaces (GPT-2's and Llama-3's pre-tokenisation cut there too, so the ids are the same), and pieces are gathered into batches
of about 256 KiB. At most three batches per worker are in flight. So each process needs constant memory (interpreter, tokenizer, a
few batches) whatever the corpus; the parent also holds one document.

Workers are fresh interpreters that exchange pickles over pipes. They are started as programs, not by multiprocessing: a fork
after the tokenizer's threads have started can hang, and multiprocessing's spawn runs the user's script again in every child
unless it has a `__main__` guard. A worker exits when its input ends, so it does not outlive a killed parent. A worker that dies
(the kernel's out-of-memory killer) raises an error with its exit code and never hangs.
"""

import os
import pickle
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from windlass.data.tokenize.cores import num_workers
from windlass.data.tokenize.fill_in_middle import Middles
from windlass.data.tokenize.tiktoken_encoder import Unfit, compile_bpe, first_difference
from windlass.data.tokenize.tokenizer import open_tokenizer
from windlass.errors import UserError

PIECE_CHARS = 1 << 20
BATCH_CHARS = 256 << 10
BATCHES_AHEAD = 3  # per worker: one at work, one waiting, one on its way back
IN_PROCESS_BYTES = 1 << 20  # below this, starting a worker (0.2 s) costs more than it gains (2.5 MB/s)
BYTES_PER_WORKER = 4 << 20  # of text per worker, up to the number of cores
COMPARED_EVERY = 8  # batches: the tokenizer also encodes the shortest piece of every eighth
SEAM = re.compile(r"(?<=\S\n)(?=\S)")
GOES_ON, ENDS = -2, -1
Piece = tuple[str, int]  # text, and the id behind it; GOES_ON: none; ENDS: EOS, the document ends
Encode = Callable[[Any], Any]
"""A batch of documents, or of their pieces -> ids; or a task -> its result."""
Task = Any
"""Is called with a dictionary, in which it may keep what later tasks of the same process need too."""


def document_pieces(text: str, behind: int = ENDS) -> Iterator[Piece]:
    """Cuts a document into pieces of at most PIECE_CHARS; together they are the document."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        window = text[start : start + PIECE_CHARS + 1]
        seam = max((match.start() for match in SEAM.finditer(window, len(window) // 2)), default=0)
        cut = seam or window.rfind("\n", 1, PIECE_CHARS) + 1 or PIECE_CHARS
        yield text[start : start + cut], GOES_ON
        start += cut
    yield text[start:], behind


def _parts(text: str, middles: Middles | None) -> Iterator[Piece]:
    for part, behind in [(text, None)] if middles is None else middles.parts(text):
        yield from document_pieces(part, ENDS if behind is None else behind)


def piece_batches(
    texts: Iterable[str], batch_chars: int | None = None, middles: Middles | None = None
) -> Iterator[list[Piece]]:
    """`middles`: fill_in_middle.py's, of some of the documents."""
    batch: list[Piece] = []
    num_chars = 0
    for text in texts:
        for piece in _parts(text, middles):
            batch.append(piece)
            num_chars += len(piece[0])
            if num_chars >= min(BATCH_CHARS, batch_chars or BATCH_CHARS):
                yield batch
                batch, num_chars = [], 0
    if batch:
        yield batch


class Encoder:
    """Encodes batches in this process: ids of all pieces in order, each with the id behind it."""

    def __init__(self, tokenizer_directory: Path, is_fast: bool = False, middles: Middles | None = None):
        self._tokenizer, self._eos_id = open_tokenizer(tokenizer_directory)
        self._as_text = None if middles is None else middles.as_text(self._tokenizer)
        ids = [] if middles is None else middles.ids
        self._marks = [self._tokenizer.decode([number], skip_special_tokens=False) for number in ids]
        found = compile_bpe(tokenizer_directory) if is_fast else None
        assert not isinstance(found, Unfit), found
        self._fast, self._num_batches = found, 0

    def __call__(self, batch: list[Piece]) -> np.ndarray:
        if self._fast is not None:
            if self._num_batches % COMPARED_EVERY == 0:
                plain = (text for text, _ in batch if text and not self._holds_mark(text))
                self._compare(min(plain, key=len, default=""))
            self._num_batches += 1
        if self._fast is not None or any(self._holds_mark(text) for text, _ in batch):
            found = [ids for text, behind in batch for ids in (self._ids(text), self._behind(behind))]
            return np.concatenate(found)
        encodings = self._tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
        pairs = [(np.array(e.ids, np.int32), self._behind(behind)) for e, (_, behind) in zip(encodings, batch)]
        return np.concatenate([ids for pair in pairs for ids in pair])

    def _holds_mark(self, text: str) -> bool:
        return any(mark in text for mark in self._marks)

    def _ids(self, text: str) -> np.ndarray:
        as_text = self._as_text if self._holds_mark(text) else None
        if as_text is None and self._fast is not None:
            return self._fast(text)
        encoding = (as_text or self._tokenizer).encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32)

    def _behind(self, behind: int) -> np.ndarray:
        ids = {GOES_ON: [], ENDS: [self._eos_id]}.get(behind, [behind])
        return np.array(ids, np.int32)

    def _compare(self, text: str) -> None:
        assert self._fast is not None
        where = first_difference(self._tokenizer, self._fast, text)
        if where is not None:
            raise UserError(
                f"tiktoken and the tokenizer give other ids for {where}",
                "tiktoken is used where it gives the tokenizer's own ids; a sample had shown no difference",
                "uninstall tiktoken, and prepare again: then the tokenizer itself encodes",
            )


def run_worker() -> None:
    """Runs a worker: reads what makes its encoder, then batches; writes ids."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    make, arguments = pickle.load(source)
    encoder: Encode | None = None
    while True:
        try:
            batch = pickle.load(source)
        except EOFError:
            return
        try:
            encoder = encoder or make(*arguments)
            result = encoder(batch)
        except UserError as error:  # the parent raises it
            result = error
        pickle.dump(result, sink, protocol=pickle.HIGHEST_PROTOCOL)
        sink.flush()


class Workers:
    """Worker processes, each driven by one thread of this process. Use as a context."""

    def __init__(self, num_workers: int, make: Callable[..., Encode], *arguments: object):
        """`make`: importable by its name; each worker calls it with `arguments`."""
        search = f"PYTHONPATH={os.pathsep.join(sys.path)}"  # also the entries that this program added
        program = [sys.executable, "-P", "-m", "windlass.data.tokenize.pool"]
        command = ["env", "TOKENIZERS_PARALLELISM=false", search, *program]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(num_workers)
        ]
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for process in self._processes:
            self._send(process, (make, arguments))
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(num_workers)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()  # a thread that waits for it then sees the end of its output
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.communicate()

    def _send(self, process: "subprocess.Popen[bytes]", item: object) -> None:
        assert process.stdin is not None
        pickle.dump(item, process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()

    def _encode(self, batch: Any) -> Any:
        process = self._idle.get()
        assert process.stdout is not None
        try:
            self._send(process, batch)
            ids = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            raise RuntimeError(f"a tokenising process died, exit code {process.wait()} (-9: out of memory?)") from error
        finally:
            self._idle.put(process)
        if isinstance(ids, UserError):
            raise ids
        return ids

    def map(self, todo: Iterable[Any]) -> Iterator[Any]:
        """Results in the order of `todo`, which is read no further ahead than workers need."""
        pending: deque[Future[Any]] = deque()
        for batch in todo:
            pending.append(self._threads.submit(self._encode, batch))
            while pending and (pending[0].done() or len(pending) >= BATCHES_AHEAD * len(self._processes)):
                yield pending.popleft().result()  # results are not held back by a slow source
        while pending:
            yield pending.popleft().result()


class TaskRunner:
    """Runs tasks in order, in this process or in workers where there is enough for them to do. Use as a context."""

    def __init__(self, num_cores: int):
        self._num_cores, self._here = num_cores, _run_tasks()
        self._workers: Workers | None = None
        self._num_workers = 0

    def __enter__(self) -> "TaskRunner":
        return self

    def __exit__(self, *_: object) -> None:
        if self._workers is not None:
            self._workers.__exit__()

    def map(self, tasks: Iterable[Task], num_bytes: int) -> Iterator[Any]:
        """The results of `tasks`, in their order. Raises UserError. num_bytes: about how much is to be read; decides how many
        workers to start."""
        count = num_text_workers(num_bytes, self._num_cores)
        if count == 0:
            yield from map(self._here, tasks)
            return
        if count > self._num_workers:
            self.__exit__()
            self._workers, self._num_workers = Workers(count, _run_tasks), count
        assert self._workers is not None
        yield from self._workers.map(tasks)

    def pairs(self, tasks: Iterable[Task], num_bytes: int) -> Iterator[tuple[Task, Any]]:
        """Each task with its result, in their order."""
        begun: deque[Task] = deque()

        def noted() -> Iterator[Task]:
            for task in tasks:
                begun.append(task)
                yield task

        for result in self.map(noted(), num_bytes):
            yield begun.popleft(), result


def _run_tasks() -> Encode:
    kept: dict[Any, Any] = {}
    return lambda task: task(kept)


def num_text_workers(num_bytes: int, num_cores: int) -> int:
    """How many workers to start for texts."""
    return num_workers(num_bytes, num_cores, IN_PROCESS_BYTES, BYTES_PER_WORKER)


def encode(
    texts: Iterable[str],
    num_bytes: int,
    tokenizer_directory: Path,
    num_cores: int,
    is_fast: bool = False,
    batch_chars: int | None = None,
    middles: Middles | None = None,
) -> Iterator[np.ndarray]:
    """Ids of all documents, in order, as int32 arrays, with EOS after every document.

    num_bytes: about how much text there is; decides how many workers to start. is_fast: encode with tiktoken. batch_chars: about
    how much text to encode at once, if less than BATCH_CHARS. middles: fill_in_middle.py's.
    """
    count = num_text_workers(num_bytes, num_cores)
    if count == 0:
        yield from map(Encoder(tokenizer_directory, is_fast, middles), piece_batches(texts, batch_chars, middles))
        return
    with Workers(count, Encoder, tokenizer_directory, is_fast, middles) as workers:
        yield from workers.map(piece_batches(texts, batch_chars, middles))


if __name__ == "__main__":
    run_worker()
