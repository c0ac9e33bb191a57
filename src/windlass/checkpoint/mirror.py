"""Committed checkpoints, copied to an object store and back: a run without a disk that outlives its machine.

    <remote>/run.json, events.jsonl, ...      the run's own small files, as of the newest copy
    <remote>/step-00000100/rank-00000.bin ... index.json trainer_state.json ... and last MANIFEST

A store has no rename, so MANIFEST, written last, is the commit; files without one are a copy that was cut off. Copies are made by
a thread of rank 0 after the commit on disk, one at a time and always of the newest step: a slow store skips steps, and holds no
step of training up. The step that is being copied is not pruned. Old copies are removed, MANIFEST first, once a newer one is
whole. What is fetched is verified byte for byte before it gets a step's name; a copy that fails that is passed over.
"""

import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from windlass.checkpoint.commit import check_space, committed_steps, fsync_directory
from windlass.checkpoint.config import CheckpointConfig
from windlass.checkpoint.keep import kept_steps
from windlass.checkpoint.manifest import MANIFEST, Manifest, new_token, step_name, step_of
from windlass.checkpoint.verify import Checkpoint, complaint, verify_checkpoint
from windlass.errors import BadCheckpoint, UserError
from windlass.object_store import Store

RUN_FILE: Final = "run.json"
KEPT_BESIDE: Final = (RUN_FILE, "events.jsonl", "recipe.yaml", "resolved.yaml", "report.html")
"""Files of the run directory that are copied with a checkpoint, where they are there."""
AT_ONCE: Final = 4
"""Files that are copied side by side. Chosen: one seldom fills a link, and each holds a part in memory."""
DEADLINE_S: Final = 120.0
"""The longest try of a request. Chosen."""
BYTES_PER_S: Final = float(4 << 20)
"""A slower store is one that does not answer."""


def open_remote(url: str) -> Store:
    """Raises UserError where the URL is none that can be written."""
    store = Store(url, DEADLINE_S, setting=None, bytes_per_s=BYTES_PER_S)
    store.check_writable()
    return store


class Copied(NamedTuple):
    """What became of one copy. `num_bytes`: 0 where the store had it already. `error`: why there is none."""

    step: int
    num_bytes: int
    error: UserError | None


class Mirror:
    """Copies of one run's checkpoints, made on rank 0."""

    def __init__(self, store: Store, run_directory: Path, config: CheckpointConfig):
        self._store, self._run_directory, self._config = store, run_directory, config
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wanted: int | None = None
        self._copying: int | None = None
        self._is_closing = False
        self._news: list[Copied] = []
        self._last: Copied | None = None

    def offer(self, step: int) -> None:
        """`step` is committed: it is copied next, unless a newer one is offered before that begins. Returns at once."""
        with self._changed:
            self._wanted = step
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="checkpoint-mirror", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def held(self) -> set[int]:
        """Steps that must stay on disk: the one that is being copied, and the one that is next."""
        with self._changed:
            return {step for step in (self._copying, self._wanted) if step is not None}

    def poll(self) -> list[Copied]:
        """What has ended since the last call."""
        with self._changed:
            news, self._news = self._news, []
        return news

    def close(self) -> str:
        """Returns when the newest step that was offered is copied, with what the run has written since -> where. Raises the
        UserError that its copy ended by."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            assert self._last is not None
            if self._last.error is not None:
                raise self._last.error
            self._copy_beside()
        return self._store.url

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted is not None or self._is_closing)
                if self._wanted is None:
                    return
                step, self._copying, self._wanted = self._wanted, self._wanted, None
            num_bytes, error = 0, None
            try:
                num_bytes = self._copy(step)
            except UserError as raised:
                error = raised
            except OSError as raised:
                error = UserError(
                    f"{step_name(step)} cannot be copied to {self._store.url}: {raised}",
                    "a committed checkpoint stays readable while it is copied",
                    "see that nobody removes checkpoints of this run by hand",
                )
            with self._changed:
                self._copying, self._last = None, Copied(step, num_bytes, error)
                self._news.append(self._last)

    def _copy(self, step: int) -> int:
        """-> bytes that were written; the checkpoint is whole in the store when this returns."""
        found, name = Checkpoint.open(self._run_directory / "checkpoints" / step_name(step)), step_name(step)
        there = whole_steps(self._store)
        if there.get(step) == found.manifest:
            return 0
        self._remove([step])  # a copy that was cut off, or of another save of this step
        with ThreadPoolExecutor(AT_ONCE) as pool:
            files = found.manifest.files
            list(pool.map(lambda file: self._store.write(f"{name}/{file}", found.directory / file), files))
        self._copy_beside()
        self._store.write(f"{name}/{MANIFEST}", found.manifest_bytes)
        metrics = {other: manifest.metric for other, manifest in {**there, step: found.manifest}.items()}
        self._remove(sorted(set(metrics) - kept_steps(metrics, self._config) - {step}))
        return found.manifest.num_bytes

    def _copy_beside(self) -> None:
        for name in KEPT_BESIDE:
            if (file := self._run_directory / name).is_file():
                self._store.write(name, file.read_bytes())  # it may grow meanwhile

    def _remove(self, steps: list[int]) -> None:
        """MANIFEST first: what is left then is no checkpoint."""
        names = [step_name(step) for step in steps]
        found = [name for name in self._store.sizes() if name.partition("/")[0] in names]
        self._store.remove(sorted(found, key=lambda name: not name.endswith(f"/{MANIFEST}")))


def whole_steps(store: Store) -> dict[int, Manifest]:
    """The checkpoints that the store holds, with their manifests, newest first. One whose MANIFEST is damaged is left out."""
    found = {}
    for name in store.sizes():
        folder, _, file = name.partition("/")
        if file == MANIFEST and (step := step_of(folder)) is not None:
            try:
                found[step] = Checkpoint.parse(Path(folder), store.read(name)).manifest
            except (BadCheckpoint, FileNotFoundError):  # removed meanwhile
                continue
    return dict(sorted(found.items(), reverse=True))


def fetch_newest(store: Store, run_directory: Path, log: Callable[[str], None]) -> int | None:
    """Brings the newest whole checkpoint of the store into the run directory, where it is newer than all that are there -> its
    step, else None. One caller at a time. Raises UserError where the store holds another run, BadCheckpoint where it holds
    checkpoints and neither one of them nor one here is whole."""
    there, here = whole_steps(store), committed_steps(run_directory / "checkpoints")
    newer = [step for step in there if step > max(here, default=-1)]
    if there:
        _check_run(store, run_directory)
    for step in newer:
        log(f"{store.url}: fetching {step_name(step)}")
        try:
            _fetch(store, there[step], run_directory / "checkpoints")
        except BadCheckpoint as error:
            log(f"{store.url}/{step_name(step)} is skipped: {error.given}")
            continue
        for name in KEPT_BESIDE:
            try:
                (run_directory / name).write_bytes(store.read(name))
            except FileNotFoundError:
                continue
        return step
    if newer and not here:
        raise BadCheckpoint(
            f"{store.url} holds {len(newer)} checkpoints, and none of them is whole",
            "a run that has checkpoints goes on from one of them, or not at all",
            "to start over, give another checkpoint.remote; the present copies stay",
        )
    return None


def _check_run(store: Store, run_directory: Path) -> None:
    try:
        ours = json.loads((run_directory / RUN_FILE).read_text("utf-8"))["run_id"]
        theirs = json.loads(store.read(RUN_FILE))["run_id"]
    except (OSError, ValueError, KeyError, TypeError):  # a new directory, or one whose id will be drawn anew
        return
    if ours != theirs:
        raise UserError(
            f"checkpoint.remote={store.url} holds another run than run.directory={run_directory}",
            "checkpoints of two runs in one store directory would replace each other",
            "give each run its own checkpoint.remote; to resume the run in the store, choose an empty run.directory",
        )


def _fetch(store: Store, manifest: Manifest, checkpoints: Path) -> None:
    """Raises BadCheckpoint where the copy is not whole."""
    check_space(checkpoints, manifest.num_bytes)
    name = step_name(manifest.step)
    draft = checkpoints / f".tmp-{manifest.step:08d}-{new_token(manifest.run_id)}"
    try:
        for file in manifest.files:
            (draft / file).parent.mkdir(parents=True, exist_ok=True)
        sizes = {**{file: entry.size for file, entry in manifest.files.items()}, MANIFEST: 0}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda file: store.download(f"{name}/{file}", draft / file, sizes[file]), sizes))
        if problems := verify_checkpoint(draft):
            raise complaint(draft, problems)
        for file in sizes:
            _sync(draft / file)
        for folder in {(draft / file).parent for file in sizes}:
            fsync_directory(folder)
        draft.rename(checkpoints / name)
        fsync_directory(checkpoints)
    except FileNotFoundError as error:
        raise BadCheckpoint(
            f"{store.url}/{name} lacks a file: {error}", "MANIFEST lists every file", "copy it again"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
