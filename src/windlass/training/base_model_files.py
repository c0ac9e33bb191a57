"""What a run keeps of the model that it began from, in every checkpoint: how its authors sample from it, and its license.

An export reads both from the checkpoint. It is written on any host, at any time: the directory or the cache that `model.from`
named then may be gone, and what an export says must not depend on that.
"""

import re
from pathlib import Path

from windlass.checkpoint.restore import candidates
from windlass.checkpoint.store import committed_steps
from windlass.checkpoint.verify import Checkpoint
from windlass.config import RunConfig
from windlass.errors import BadCheckpoint
from windlass.model.hf import GENERATION
from windlass.model.open_config import directory_of
from windlass.objectives.kept_scores import SCORES

KEPT_GENERATION = f"base/{GENERATION}"
KEPT_CARD = "base/README.md"  # its front matter alone
CARD = "README.md"
FRONT_MATTER = re.compile(r"\A---\r?\n(.*?\n)---\r?\n", re.DOTALL)


def base_files(config: RunConfig, is_new: bool) -> dict[str, bytes | Path]:
    """The files of a checkpoint on `model.from`, by their names in it: read beside the weights by a run that is new,
    and from the checkpoint that it goes on from by one that is not. Raises UserError."""
    if is_new:
        return {} if config.model.from_ is None else read_base(directory_of(config.model))
    own = config.run.directory
    source = (
        own if committed_steps(own / "checkpoints") or config.run.start_from is None else Path(config.run.start_from)
    )
    for directory in candidates(source):
        try:
            return dict(kept_files(directory))
        except BadCheckpoint:  # restoring takes the one before it too
            continue
    return {}


def read_base(directory: Path) -> dict[str, bytes | Path]:
    """The same of a Hugging Face directory."""
    found: dict[str, bytes | Path] = {}
    if (directory / GENERATION).is_file():
        found[KEPT_GENERATION] = (directory / GENERATION).read_bytes()
    card = directory / CARD
    match = FRONT_MATTER.match(card.read_text("utf-8", errors="replace")) if card.is_file() else None
    if match is not None:
        found[KEPT_CARD] = match[0].encode()
    return found


def kept_files(checkpoint: Path) -> dict[str, bytes]:
    """What a checkpoint directory keeps of the base. Raises BadCheckpoint."""
    opened = Checkpoint.open(checkpoint)
    return {name: opened.read(name) for name in (KEPT_GENERATION, KEPT_CARD, SCORES) if name in opened.manifest.files}
