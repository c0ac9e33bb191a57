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

Rooms, from the command line down: cli, commands, proof, flyte, launch; training, objectives, adapters, data, model, precision,
parallel, optim, checkpoint, report, plan; ranks, supervise, profiling, advice, doctor, hub, other_names. Each one's __init__ is
its picture. Beside them:

what a run is read from:
config           the whole recipe: the rooms' configs side by side, and the rules between them
recipe           its YAML, overrides and environment variables
settings         the base of every config
mistakes         all that is wrong in a recipe, at once
keys             its keys as `windlass keys` lists them

a process and its host:
contract         the names by which launchers say which rank this is
runtime          a rank's process: device, process group, threads
signals          what a signal does
output           what a rank prints
host_speeds      how fast hosts compute and reach each other
flight_recorder  the collectives that this rank has begun

for every room:
errors           their kinds and exit codes
status           status.json, what became of a run
object_store     files of a store with a URL
safe_text        texts without secrets
units            bytes, counts, rates, durations as text
hardware         data sheets of devices
version          the version
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
    "Sampling": ("commands.models.sampling", "Sampling"),
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
