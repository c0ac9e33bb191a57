"""windlass: pretrain and finetune language models on one process or thousands.

From Python, a run is three lines::

    from windlass import load_recipe, train
    recipe = load_recipe("recipes/demo.yaml", "run.steps=100")
    train(recipe)

Importing the package is free (no torch): `load_recipe` and `train` are fetched when they are first named.
"""

from typing import Any

from windlass.errors import Stopped, UserError
from windlass.version import __version__

__all__ = ["Stopped", "UserError", "__version__", "load_recipe", "train"]


def __getattr__(name: str) -> Any:
    if name == "load_recipe":
        from windlass.config import load_recipe

        return load_recipe
    if name == "train":
        from windlass.training.loop import train

        return train
    raise AttributeError(f"module 'windlass' has no attribute {name!r}")
