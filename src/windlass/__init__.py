"""windlass: pretrain and finetune language models on one process or thousands.

From Python, a run is three lines::

    from windlass import load_recipe, train
    recipe = load_recipe("recipes/demo.yaml", "run.steps=100")
    train(recipe)

`parse_recipe(text)` takes the recipe's text in place of its file, and `fingerprint(recipe)` is the hash by which a preparation of
its data is recognised. Importing the package is free (no torch): each function is fetched when it is first named.
"""

from typing import TYPE_CHECKING, Any

from windlass.errors import Stopped, UserError
from windlass.version import __version__

if TYPE_CHECKING:
    from windlass.config import load_recipe, parse_recipe
    from windlass.training.loop import train
    from windlass.training.pins import fingerprint

__all__ = ["Stopped", "UserError", "__version__", "fingerprint", "load_recipe", "parse_recipe", "train"]


def __getattr__(name: str) -> Any:
    if name in ("load_recipe", "parse_recipe"):
        from windlass import config

        return getattr(config, name)
    if name == "train":
        from windlass.training.loop import train

        return train
    if name == "fingerprint":
        from windlass.training.pins import fingerprint

        return fingerprint
    raise AttributeError(f"module 'windlass' has no attribute {name!r}")
