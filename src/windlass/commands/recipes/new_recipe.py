"""`windlass init` and `windlass import`: a recipe from a few answers, or from another tool's file. No file is overwritten."""

import glob
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar, get_args

from windlass.commands.recipes.factory_v1_file import is_list
from windlass.commands.recipes.first_rows import (
    MANY,
    Kind,
    Shape,
    bad_rows_note,
    first_rows,
    has_rows,
    num_distinct,
    shape_of_file,
)
from windlass.commands.recipes.import_recipe import import_recipe
from windlass.commands.recipes.imported_recipe import Imported
from windlass.commands.recipes.row_lengths import USUAL, Chosen, choose_length, missing_template
from windlass.commands.recipes.split_folder import find_split
from windlass.commands.recipes.written_recipe import SMALL, epochs_of_chats, written
from windlass.config import parse_recipe
from windlass.data.files import write_durably
from windlass.errors import UserError, nearest, nearest_entry
from windlass.hub.client import is_hub_name
from windlass.model.config import architecture_from_hf
from windlass.model.flops import count_parameters
from windlass.recipe import parse_yaml, recipe_text
from windlass.safe_text import say
from windlass.settings import read_count

Answer = TypeVar("Answer")
Ask = Callable[[str, str], str]
"""(question, default) -> the answer."""
DATASETS: Final = "dataset_info.json"
HELD_OUT: Final = 8
"""Documents of the validation set, on average: the hash of each decides, so that a set of two may be empty."""
SHARE_OF_FEW: Final = 20  # one part of so much


def import_file(file: Path, out: Path | None, tool: str | None, ranks: int) -> tuple[str, Imported]:
    """The recipe's text, which loads, and what became of each key; written to `out` where that is given. Raises UserError, and
    then nothing is written."""
    _check_new(out)
    if not file.is_file():
        raise UserError(
            f"{file} is a directory" if file.is_dir() else f"no file at {file}",
            "import reads one file of axolotl, LLaMA-Factory or torchtune",
            f"{nearest_entry(file)}give the path of that file",
        )
    text, name = recipe_text(file)
    given = parse_yaml(text, name)
    found = import_recipe(given, file.name, tool=tool, ranks=ranks, datasets=_datasets(given))
    recipe = found.text(file.name)
    try:
        parse_recipe(recipe, f"the recipe from {name}")
    except UserError as error:
        raise UserError(
            f"the recipe from {name} does not load: {error.given}", error.rule, f"in that file: {error.change}"
        ) from None
    if out is not None:
        write_durably(out, recipe.encode())
    return recipe, found


def _asked(
    ask: Ask | None, question: str, default: str, check: Callable[[str], Answer], given: str | None = None
) -> Answer:
    """What `check` returns for what is given, or for the first answer that it takes; for `default` where nobody is asked. Raises
    UserError for what is given."""
    if given is not None or ask is None:
        return check(default if given is None else given)
    while True:
        try:
            return check(ask(question, default))
        except UserError as error:  # the answers before it stay
            say(error, sys.stderr)


def _check_model(model: str) -> str:
    """-> `model`. Raises UserError for a name that is no model: a typo would be found when the run begins."""
    if (Path(model).expanduser() / "checkpoints").is_dir():
        raise UserError(
            f"--model {model}",
            "it is a run; --model takes a model that a run exported",
            f"windlass export {shlex.quote(model)}, then --model {shlex.quote(model.rstrip('/') + '/export')}",
        )
    folder = Path(model).expanduser()
    # runs/nope, beside a folder `runs`: more likely a path with a typo than a hub name
    is_in_folder = is_hub_name(model) and folder.parent.is_dir()
    if model != SMALL and not folder.is_dir() and (is_in_folder or not is_hub_name(model)):
        near = nearest(model, [SMALL]) or nearest_entry(folder, (one.name for one in folder.parent.glob("*/")))
        elsewhere = f"for a hub name, run init where no folder is called {folder.parent}; " if is_in_folder else ""
        raise UserError(
            f"--model {model}" + (f": the folder {folder.parent} has no {folder.name}" if is_in_folder else ""),
            f"a model is {SMALL} (a new one), a directory here, or a hub name, which has the form org/name",
            f"{near}{elsewhere}for example --model Qwen/Qwen3-4B, or --model {SMALL}",
        )
    return model


def _num_parameters(model: str) -> int | None:
    """The parameters of the model in a local directory, counted from its config.json; None where that is not possible."""
    try:
        return count_parameters(
            architecture_from_hf(json.loads((Path(model).expanduser() / "config.json").read_bytes()))
        )
    except (OSError, ValueError, TypeError, AttributeError, UserError):  # `train` says what is wrong with it
        return None


def init(
    out: Path, data: str | None, model: str | None, steps: int | str | None, kind: Kind | None, ask: Ask | None
) -> tuple[list[str], list[str]]:
    """Writes a short recipe to `out` -> sentences on the choices in it, and on what must be fixed before it can
    run. What is not given is asked for: `ask(question, default)`; None where there is nobody to ask. Raises UserError."""
    _check_new(out)
    if kind is not None and kind not in get_args(Kind):
        raise UserError(
            f"--kind {kind}", f"a run is one of {', '.join(get_args(Kind))}", "leave it out to go by the data"
        )
    if data is None and ask is None:
        raise UserError(
            "no --data, and no terminal to ask on",
            "a recipe begins from data: a file, a directory, a glob, a URL or a dataset of the hub",
            "windlass init --data corpus.jsonl; more: --model, --steps, --kind, -o",
        )
    source = _asked(ask, "Data: a file, directory, glob, URL or hub dataset", "", _source, data)
    split = find_split(source.get("path", "").rstrip("/"))
    source = {"path": split.train} if split else source
    question = f"Model: a hub name or directory to finetune, or {SMALL} for a new one"
    model = _asked(ask, question, SMALL, _check_model, model or None)
    file = _first_file(source)
    if has_rows(file) and next(first_rows(file), None) is None:
        raise UserError(
            f"{file} has no row that can be read", "rows are objects of JSON", "correct the file, or name another"
        )
    kind = (shape := shape_of_file(file, kind)).kind
    if model == SMALL and kind != "pretrain":
        raise UserError(
            f"--model {SMALL} with {'pairs' if kind == 'dpo' else 'conversations'}",
            "turns are marked by the chat template of a model's tokenizer, and a new model has none",
            "name a model, such as --model Qwen/Qwen3-4B; or --kind pretrain for texts",
        )
    is_text, usual = kind == "pretrain", Chosen(256 if model == SMALL else USUAL, "drop", "")
    chosen = usual if is_text else choose_length(file, shape, model)
    settings = {**shape.settings, **({} if is_text else {"too_long": chosen.too_long})}
    num_parameters, rows = _num_parameters(model), {**source, **settings}
    duration = _duration(steps, kind, ask, epochs_of_chats(num_parameters, chosen))
    held_out = split.validation(settings) if split else _validation(source, file, shape)
    text = written(out, rows, model, duration, kind, chosen, held_out, num_parameters)
    parse_recipe(text, str(out))
    to_mend = [missing_template(model) if kind == "sft" else None, bad_rows_note(rows)]
    write_durably(out, text.encode())
    chose = [f"data.sequence_length={chosen.length}: {chosen.meaning}"] if chosen.meaning else []
    chose += [f"data.validation: {split.meaning}"] if split else []
    return chose, [sentence for sentence in to_mend if sentence]


def _validation(source: Mapping[str, str], file: Path, shape: Shape) -> tuple[str, str]:
    """A share that holds several documents; of few, of which none may be held out, a twentieth of their bytes. And a comment."""
    number = _num_documents(source, file, shape)
    if number == 1 and shape.kind != "pretrain":
        return "none", "all rows are the same: none can be held out"
    if number < 2 * HELD_OUT:
        num_bytes = max(1, _num_bytes(source) // SHARE_OF_FEW)
        held_out = "whole documents, and the end of one" if shape.kind == "pretrain" else "whole rows"
        return f"{{bytes: {num_bytes}}}", f"held out: {held_out}"
    return f"{max(0.05, HELD_OUT / number):.2g}", "share of the documents"


def _num_bytes(source: Mapping[str, str]) -> int:
    """Bytes of the source's files on this host."""
    path = Path(source["path"]).expanduser()
    files = path.rglob("*") if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
    return sum(file.stat().st_size for file in files if file.is_file())


def _num_documents(source: Mapping[str, str], file: Path, shape: Shape) -> int:
    """How many documents differ, at most MANY; MANY where they are not here, or of a format whose rows are not counted."""
    given = source.get("path", "")
    path = Path(given).expanduser()
    if path.is_dir():
        return sum(1 for _ in islice((one for one in path.rglob("*") if one.is_file()), MANY))
    if "*" in given and "://" not in given:
        return len(list(islice(glob.iglob(str(path), recursive=True), MANY)))
    if has_rows(file):
        return num_distinct(file, shape)
    return 1 if path.is_file() and path.suffix != ".parquet" else MANY


def _first_file(source: Mapping[str, str]) -> Path:
    """Whose rows say what all are: the source itself, or the first of a glob."""
    path = Path(source.get("path", "")).expanduser()
    return path if path.exists() else Path(min(_glob(path), default=path))


def _glob(path: Path) -> Iterator[str]:
    return glob.iglob(str(path), recursive=True)


def _check_new(out: Path | None) -> None:
    """Before anything is read or asked for."""
    if out is None:
        return
    if out.exists():
        raise UserError(f"{out} is there already", "a recipe is never overwritten", "give another name: -o FILE")
    if not out.parent.is_dir():
        what = "is not a directory" if out.parent.exists() else "does not exist"
        raise UserError(
            f"-o {out}: {out.parent} {what}",
            "a recipe is written into a directory that exists",
            ("" if out.parent.exists() else f"make it (mkdir -p {shlex.quote(str(out.parent))}), or ")
            + "give another name: -o FILE",
        )
    if not os.access(out.parent, os.W_OK):
        raise UserError(
            f"-o {out}: {out.parent} cannot be written by this user",
            "a recipe is written into a directory of yours",
            "give another name: -o FILE",
        )


def _datasets(given: object) -> dict[str, object]:
    """The data sets that LLaMA-Factory's file beside the recipe describes; empty where there is no such file here."""
    keys = given if isinstance(given, dict) else {}
    listed = keys.get("train_dataset")  # of v1: such a file itself, or data
    file = Path(str(listed)) if is_list(listed) else Path(str(keys.get("dataset_dir", "data"))) / DATASETS
    try:
        text = file.read_text("utf-8")
        found = parse_yaml(text, str(file)) if is_list(listed) else json.loads(text)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _source(data: str) -> dict[str, str]:
    """The recipe's source for `data`: a path for files here and for URLs, a dataset for what looks like a name on the hub. Raises
    UserError."""
    if not data:
        raise UserError(
            "no data", "a recipe begins from data", "give a file, a directory, a glob, a URL or a hub dataset"
        )
    path = Path(data).expanduser()
    if "://" not in data and (path.exists() or glob.has_magic(data)):
        files = [path] if path.is_file() else path.rglob("*") if path.is_dir() else map(Path, _glob(path))
        if not any(file.is_file() and file.stat().st_size for file in files):
            raise UserError(
                f"nothing in {data}", "a recipe is written for data that exists", "name a file that is not empty"
            )
    if "://" in data or glob.has_magic(data) or path.exists():
        return {"path": data}
    if data.count("/") == 1 and not data.startswith((".", "/", "~")) and not path.suffix:
        return {"hub": data}
    raise UserError(
        f"no data at {data}",
        "data are files here, a URL, or a dataset of the hub (org/name)",
        f"{nearest_entry(path)}correct the path",
    )


def _duration(steps: int | str | None, kind: Kind, ask: Ask | None, epochs: str) -> tuple[str, int]:
    """(steps or epochs, how many). Without `steps` conversations and pairs get epochs: they are few, and read a few times."""
    unit, usual = {"sft": ("epochs", epochs), "dpo": ("epochs", "1")}.get(kind, ("steps", "1000"))
    if steps is not None:
        return "steps", _count(str(steps))
    return unit, _asked(ask, "Epochs" if unit == "epochs" else "Optimizer steps", usual, _count)


def _count(text: str) -> int:
    number = read_count(text)
    number = int(number) if isinstance(number, str) and number.isdecimal() else number
    if not isinstance(number, int) or number < 1:
        raise UserError(
            f"{text!r} steps",
            "a number of steps or epochs is whole, and at least 1",
            "give a number such as 1000 or 1k",
        )
    return number
