"""The safetensors files of a Hugging Face directory, and which of their entries are not weights.

Other tools write a head beside the embedding of a tied model. It must be a copy, or the files mean another model:
transformers 5 trains and runs a head that differs, and dropping it silently would change the model.
"""

from pathlib import Path
from typing import Any, Final

from windlass.errors import UserError
from windlass.hub.client import INDEX, PICKLED, SINGLE, indexed_files

POINTER: Final = b"version https://git-lfs.github.com/spec"
NAMED: Final = 5  # tensors that an error message lists
ROWS_AT_ONCE: Final = 4096


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a Hugging Face directory, in transformers' order of preference."""
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not (directory / INDEX).is_file():
        raise _no_weights(directory)
    names = indexed_files(directory / INDEX, str(directory / INDEX), "copy or download the index again")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise UserError(
            f"{directory}: {len(missing)} of {len(names)} weight files are missing: {shortened_list(missing)}",
            f"{INDEX} names them",
            "copy or download the missing files",
        )
    return [directory / name for name in names]


def _no_weights(directory: Path) -> UserError:
    pickled = sorted(file.name for file in directory.glob("*") if file.suffix in PICKLED) if directory.is_dir() else []
    if pickled:
        return UserError(
            f"{directory}: only pickled weights: {shortened_list(pickled)}",
            "unpickling runs whatever code the file holds, so only safetensors are read",
            "convert it where you trust it: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)",
        )
    return UserError(
        f"{directory}: neither {SINGLE} nor {INDEX}",
        "a Hugging Face directory holds its weights in one of these",
        "give the directory that holds the weights",
    )


def is_pointer(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(POINTER)) == POINTER


def shortened_list(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")


def check_stored_head(head: Any, embedding: Any, where: str) -> None:
    """`head`, `embedding`: lazy slices of safetensors, [V, D]. Raises UserError unless they hold the same numbers."""
    shape, expected = tuple(head.get_shape()), tuple(embedding.get_shape())
    starts = range(0, expected[0], ROWS_AT_ONCE)
    if shape == expected and all(
        (head[start : start + ROWS_AT_ONCE] == embedding[start : start + ROWS_AT_ONCE]).all() for start in starts
    ):
        return
    what = "differs from the embedding" if shape == expected else f"has the shape {shape}, the embedding {expected}"
    raise UserError(
        f"{where}: lm_head.weight {what}, and the model is tied (tie_word_embeddings)",
        "the head of a tied model is its embedding; a head of its own is another model",
        "set model.tie_word_embeddings=false to train the head that is there, or take it out of the files to train without it",
    )
