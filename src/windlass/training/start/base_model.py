"""The model that a run began from: what its checkpoints keep of it, and the frozen base that they do not hold.

Every checkpoint keeps how the authors of `model.from` sample from it, and its license: an export reads both from the checkpoint,
on any host and at any time, when that directory or cache may be gone. A preference run keeps its reference scores too.

Beside an adapter a checkpoint holds the trained tensors alone, and says beside what they were trained: the directory or hub
name, the commit, and the hash of every weight file. Whoever opens it reads the base from there, or from another path
(`--base`), and compares.
"""

import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from windlass.adapters.peft_config import completed
from windlass.adapters.peft_format import base_hashes, check_files
from windlass.checkpoint.commit import committed_steps
from windlass.checkpoint.manifest import MANIFEST
from windlass.checkpoint.restore import candidates
from windlass.checkpoint.verify import Checkpoint
from windlass.config import RunConfig, check_recipe
from windlass.errors import BadCheckpoint, UserError
from windlass.model.architecture import Architecture
from windlass.model.hf import GENERATION
from windlass.model.lora.adapter import adapter_of
from windlass.model.open_config import model_directory
from windlass.model.weight_files import weight_files
from windlass.objectives.kept_scores import SCORES, ReferenceScores
from windlass.runtime import Runtime
from windlass.safe_text import say

KEPT: Final = ("rank", "alpha", "rank_stabilized", "targets", "also_train")
KEPT_GENERATION = f"base/{GENERATION}"
KEPT_CARD = "base/README.md"  # its front matter alone
CARD = "README.md"
FRONT_MATTER = re.compile(r"\A---\r?\n(.*?\n)---\r?\n", re.DOTALL)


def complete_adapter(config: RunConfig, trainer_state: Mapping[str, Any] | None) -> RunConfig:
    """With what the recipe leaves to `adapter.from`: as the run began, or as the files there say. Raises UserError."""
    adapter = config.adapter
    if adapter.from_ is None:
        return config
    if trainer_state is None:
        return config.changed(adapter=completed(adapter))
    then = trainer_state["config"]["adapter"]
    kept = {name: then[name] for name in KEPT if name not in adapter.model_fields_set and name in then}
    return config.changed(adapter=adapter.changed(**kept))


def reads_weights(trainer_state: Mapping[str, Any] | None) -> bool:
    """Whether the files of `model.from` are read: by a run that begins, and by each start of one that has its base there."""
    return trainer_state is None or "base" in trainer_state


def base_of(config: RunConfig, runtime: Runtime, trainer_state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a run's checkpoints say of its base; None where all of the model is in them. Collective. Raises UserError where it is
    gone, or not the base that the run began beside: another path is none, the same files may be there."""
    if config.adapter.kind == "none":
        return None
    then = None if trainer_state is None else trainer_state.get("base")

    def described() -> dict[str, Any]:
        base = describe_base(config, _base_directory(config, "set model.from to where it is now"))
        if then is not None:
            check_base(then, base["files"], str(config.model.from_))
        return base

    return runtime.shared(runtime.first(described))


def describe_base(config: RunConfig, source: Path) -> dict[str, Any]:
    """From, commit, and the hash of every weight file."""
    return {"from": config.model.from_, "commit": config.model.commit, "files": hashes(source)}


def check_base(base: Mapping[str, Any], found: Mapping[str, str], source: str) -> None:
    """Raises UserError, with both, unless the files `found` in `source` are those of `base`."""
    given: Mapping[str, str] = base["files"]
    if found == given:
        return
    differ = [name for name in {**given, **found} if given.get(name) != found.get(name)]
    name = differ[0]
    raise UserError(
        f"{source} is not the base that this adapter was trained beside: {name} has hash {found.get(name, 'none')} there, and "
        f"had {given.get(name, 'none')} when the run began, in {base['from']}"
        + (f" at commit {base['commit']}" if base["commit"] else ""),
        "an adapter computes what it was trained to compute only beside the base that it was trained beside",
        "give the base that it began with in model.from, or with --base DIR if it has moved",
    )


def find_base(trainer_state: Mapping[str, Any], moved: Path | None) -> Path:
    """The directory of the base of a checkpoint; `moved`: where the user says it is now. Raises UserError."""
    source = moved or _base_directory(check_recipe(trainer_state["config"]), "say where it is now: --base DIR")
    check_base(trainer_state["base"], hashes(source), str(source))
    return source


def other_base(adapter: Path, source: Path) -> str | None:
    """A warning where the adapter's files name hashes of its base, and the files in `source` have others. It may be the same
    model, saved in another way: that is for the user to know. Raises UserError."""
    given = base_hashes(adapter)
    if not given or given == hashes(source):
        return None
    return (
        f"warning: {source} is not the base that the adapter in {adapter} was trained beside: its files have other hashes; "
        "an adapter computes what it was trained to only beside the same weights"
    )


def check_adapter(config: RunConfig, architecture: Architecture) -> None:
    """Raises UserError unless `adapter.from` has the factors of this recipe, and no others."""
    adapter = adapter_of(config.adapter, architecture)
    assert adapter is not None and config.adapter.from_ is not None
    check_files(Path(config.adapter.from_), architecture, adapter)
    if warning := other_base(Path(config.adapter.from_), model_directory(config.model)):
        say(warning)


def began_with(config: RunConfig) -> dict[str, Any]:
    """What the weights of a new run are a function of: hashes of the files that it reads them from, or its seed. Raises
    UserError."""
    source, adapter, start = config.model.from_, config.adapter.from_, config.run.start_from
    began: dict[str, Any] = {"adapter": config.adapter.model_dump(mode="json")}
    began |= {"seed": config.run.seed} if source is None or adapter is None else {}
    if source is None:
        began["model"] = config.model.model_dump(mode="json", by_alias=True)
    elif start is None or config.adapter.kind != "none":
        began["files"] = hashes(model_directory(config.model))
    if adapter is not None:
        began["factors"] = {file.name: _hash(file) for file in sorted(Path(adapter).glob("adapter_*"))}
    if start is not None:
        began["checkpoint"] = _hash(candidates(Path(start))[0] / MANIFEST)
    return began


def _base_directory(config: RunConfig, change: str) -> Path:
    try:
        source = model_directory(config.model)
        weight_files(source)
    except UserError as error:
        raise UserError(
            f"the base of this adapter is not at {config.model.from_}: {error.given}",
            "a checkpoint of an adapter holds only the trained tensors, and its base is read from where it was",
            change,
        ) from None
    return source


def hashes(source: Path) -> dict[str, str]:
    """By the name of every weight file in `source` its hash, of 16 bytes. Raises UserError where there is none."""
    files = weight_files(source)
    with ThreadPoolExecutor() as pool:
        return dict(zip((file.name for file in files), pool.map(_hash, files), strict=True))


def _hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def base_files(config: RunConfig, is_new: bool) -> dict[str, bytes | Path]:
    """The files of a checkpoint on `model.from`, by their names in it: read beside the weights by a run that is new,
    and from the checkpoint that it goes on from by one that is not. Raises UserError."""
    if is_new:
        return {} if config.model.from_ is None else read_base(model_directory(config.model))
    own = config.run.directory
    source = (
        own if committed_steps(own / "checkpoints") or config.run.start_from is None else Path(config.run.start_from)
    )
    for directory in candidates(source):
        try:
            return dict(kept_base_files(directory))
        except BadCheckpoint:  # restoring takes the one before it too
            continue
    return {}


def read_base(directory: Path) -> dict[str, bytes | Path]:
    """What a checkpoint keeps of the Hugging Face directory that its run begins from: name -> content, or the file itself."""
    found: dict[str, bytes | Path] = {}
    if (directory / GENERATION).is_file():
        found[KEPT_GENERATION] = (directory / GENERATION).read_bytes()
    card = directory / CARD
    match = FRONT_MATTER.match(card.read_text("utf-8", errors="replace")) if card.is_file() else None
    if match is not None:
        found[KEPT_CARD] = match[0].encode()
    return found


def kept_base_files(checkpoint: Path) -> dict[str, bytes]:
    """What a checkpoint directory keeps of the base. Raises BadCheckpoint."""
    opened = Checkpoint.open(checkpoint)
    return {name: opened.read(name) for name in (KEPT_GENERATION, KEPT_CARD, SCORES) if name in opened.manifest.files}


def kept_scores(
    trainer_state: Mapping[str, Any], files: Mapping[str, bytes | Path], where: str | Path
) -> ReferenceScores | None:
    """The kept scores of a checkpoint and its `files`; None where its reference is its base without the factors, which is so
    where its objective had a reference and kept no scores. Raises UserError where it has neither."""
    kept, then = files.get(SCORES), check_recipe(trainer_state["config"])
    scores = ReferenceScores.parse(kept) if isinstance(kept, bytes) else None
    if scores is None and not (kept is None and then.objective.has_reference and then.adapter.kind != "none"):
        raise UserError(
            f"the checkpoint in {where} holds no reference scores",
            "a pair is compared with the model that a run began with, and the trained model differs from it",
            "train on pairs in another run.directory, with run.start_from and run.start_what=weights",
        )
    return scores


def with_scores_kept(
    files: Mapping[str, bytes | Path], reference: ReferenceScores | None
) -> Mapping[str, bytes | Path]:
    """A checkpoint's `files` on the base, with the scores of a run that has some."""
    return files if reference is None else {**files, SCORES: reference.to_bytes()}
