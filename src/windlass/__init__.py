"""windlass: pretrain and finetune language models on one process or thousands.

From Python, a run is three lines::

    from windlass import load_recipe, train
    recipe = load_recipe("recipes/demo.yaml", "run.steps=100")
    train(recipe)

What the commands do, as functions; each says in its docstring what it takes, returns and raises:

    load_recipe(file, *overrides), parse_recipe(text)   a recipe, checked
    prepare(recipe)                                     its data, tokenised into shards
    fingerprint(recipe)                                 the hash by which a preparation is recognised
    train(recipe)                                       a run, new or resumed; under a launcher on every rank alike
    evaluate(path), generate(path, prompts)             scores and texts of a run, checkpoint, adapter or Hugging Face directory
    export(path, target)                                what transformers or PEFT loads, once it has compared equal
    verify(file)                                        whether the layout equals one process

Importing the package is free (no torch): each function is fetched when it is first named.
"""

from typing import TYPE_CHECKING, Any, Final

from windlass.errors import Stopped, UserError
from windlass.version import __version__

if TYPE_CHECKING:
    from windlass.commands.models.evaluate import evaluate
    from windlass.commands.models.export import export
    from windlass.commands.models.generate import generate
    from windlass.commands.models.sampling import Sampling
    from windlass.config import load_recipe, parse_recipe
    from windlass.proof.verify import verify
    from windlass.training.loop import train
    from windlass.training.preflight import prepare_only as prepare
    from windlass.training.start.pins import fingerprint

__all__ = [
    "Sampling", "Stopped", "UserError", "__version__", "evaluate", "export", "fingerprint", "generate", "load_recipe",
    "parse_recipe", "prepare", "train", "verify",
]  # fmt: skip
MODULE_OF: Final = {
    "Sampling": ("commands.models.generate", "Sampling"),
    "evaluate": ("commands.models.evaluate", "evaluate"),
    "export": ("commands.models.export", "export"),
    "fingerprint": ("training.start.pins", "fingerprint"),
    "generate": ("commands.models.generate", "generate"),
    "load_recipe": ("config", "load_recipe"),
    "parse_recipe": ("config", "parse_recipe"),
    "prepare": ("training.preflight", "prepare_only"),
    "train": ("training.loop", "train"),
    "verify": ("proof.verify", "verify"),
}


if not TYPE_CHECKING:  # or a type checker takes every name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in MODULE_OF:
            raise AttributeError(f"module 'windlass' has no attribute {name!r}")
        import importlib

        module, function = MODULE_OF[name]
        return getattr(importlib.import_module(f"windlass.{module}"), function)
