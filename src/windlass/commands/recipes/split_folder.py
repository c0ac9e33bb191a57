"""A folder that is split already, as many data sets are handed out. As one source its validation texts would be trained on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from windlass.commands.recipes.written_recipe import flow


class SplitFolder(NamedTuple):
    """Globs of the training and the validation files of a folder, and what is not read of it."""

    train: str
    held_out: str
    left_out: str

    @property
    def meaning(self) -> str:
        return f"{self.held_out}, not trained on{self.left_out and f'; {self.left_out} is not read'}"

    def validation(self, settings: Mapping[str, Any]) -> tuple[str, str]:
        return flow({"path": self.held_out, **settings}), self.meaning


def find_split(folder: str) -> SplitFolder | None:
    """None where `folder` is none, or holds more than files named train*, val* (validation*, valid*) and test*."""
    found = [*Path(folder).expanduser().glob("[!.]*")] if folder else []
    train, held_out, test = (
        [one for one in found if one.is_file() and one.name.startswith(part)] for part in ("train", "val", "test")
    )
    if not train or not held_out or len(train + held_out + test) < len(found):
        return None
    return SplitFolder(f"{folder}/train*", f"{folder}/val*", f"{folder}/test*" if test else "")
