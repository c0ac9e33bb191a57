"""A checkpoint as a Hugging Face directory that other tools load: config, generation config, safetensors, tokenizer, card.

It is written beside its place, loaded back by transformers, compared, and only then renamed: a directory called export/ is
one that works. In the default place a new export takes away the files of the one before (OWN_FILES, by name) and leaves all
others. Compared are, on ids that are no text and in fp32 from the weights as they were written (rounded, where a
smaller dtype was asked for): the logits, within 1e-5 of the largest; the greedy continuation; and the token ids of a probe
text. One model is in memory at a time, at 4 bytes per parameter, and beside it the tensor that is being written or rounded.
"""

import json
import os
import shutil
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windlass.commands.models.export_adapter import (
    IN_NF4,
    LOGIT_TOLERANCE,
    PROBE_TOKENS,
    Merging,
    auto_model,
    check_merge,
    load_with_peft,
    merged_model,
    probe_ids,
    write_adapter,
)
from windlass.commands.models.model_card import export_command, write_card
from windlass.data.tokenize.tokenizer import (
    CONFIG_FILE,
    COPIED_FILES,
    NO_LIMIT,
    OLDER_FILES,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    export_tokenizer,
)
from windlass.errors import UserError
from windlass.hub.push import check_push
from windlass.hub.push import push as upload
from windlass.model.hf import GENERATION, SHARD_BYTES, keep_sampling, save_weights
from windlass.training.start.base_model import KEPT_GENERATION, kept_base_files
from windlass.training.start.open_saved import SavedModel, open_saved

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
BESIDE = ("README.md", "config.json", GENERATION, "adapter_config.json", *OLDER_FILES, *COPIED_FILES)
OWN_FILES = {*WEIGHTS, *BESIDE} - {TEMPLATE_FILE}  # a run has one tokenizer: a template that this has not is the user's
GREEDY_TOKENS = 16
PROBE_TEXT = "The anchor weighs 1,250 kg.\n\n\tdef pull(x):  # naïve, 船の錨 🚢\r\n    return x['rope'] <= 3   \n"


@dataclass(frozen=True)
class Exported:
    directory: Path
    step: int | None
    largest_difference: float
    """Between our logits and transformers' on a probe, both in fp32 from the written weights."""
    base: str | None = None
    """The base model of an exported adapter."""
    merging: Merging | None = None
    """How far the merged model is from the base with the adapter beside it; None where no adapter is merged."""
    pushed: str | None = None
    """The address of the commit on the hub."""
    kept: tuple[str, ...] = ()
    """Files and folders of the default place that no export wrote, and that are in this one as they were. They are not pushed."""


def export(
    path: Path | str,
    target: Path | str | None = None,
    *,
    step: int | None = None,
    dtype: str = "fp32",
    max_shard_bytes: int = SHARD_BYTES,
    merge: bool = False,
    base: Path | None = None,
    push: str | None = None,
    private: bool = False,
) -> Exported:
    """Writes `target` (default: export/ in the run directory). Of a run with an adapter PEFT's files in fp32, or with `merge` the
    whole model; `base`: where its base is, if that has moved. `push`: a repository of the hub that gets it once it has compared
    equal, `private` to others. Raises UserError; a target that exists is never overwritten unless it is the default one, and in
    that files stay that no export wrote, except those whose name this export writes."""
    path, target = Path(path), None if target is None else Path(target)
    _check_push(push, private)
    _check_target(path, target, dtype)
    saved = open_saved(path, step, base=base)
    check_merge(saved, dtype, merge)
    command = export_command(saved, path, target, dtype, merge, base)
    target = target or path / "export"
    draft = target.parent / f".{target.name}.draft"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        is_adapter = saved.adapter is not None and not merge
        saved, merging = _write_weights(draft, saved, is_adapter, dtype, max_shard_bytes)
        has_tokenizer = export_tokenizer(
            saved.tokenizer_directory,
            draft,
            saved.architecture.max_positions,
            with_merges=saved.architecture.family == "gpt2",
        )
        difference = compare_models(saved, draft, DTYPES[dtype], is_adapter)
        if has_tokenizer and not is_adapter:  # transformers asks for a config.json beside it
            compare_tokenizers(draft)
        write_card(draft, saved, dtype, command, _sentence(difference, has_tokenizer, is_adapter, merging), is_adapter)
        written = sorted(file.name for file in draft.iterdir())
        kept = keep(target, draft)
        replace(target, draft)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # what did not compare equal is not left behind
    name = saved.trainer_state["base"]["from"] if is_adapter else None
    message = f"windlass export{'' if saved.step is None else f' of step {saved.step}'}"
    pushed = upload(target, push, message, private=private, files=written) if push is not None else None
    return Exported(target, saved.step, difference, name, merging, pushed, tuple(kept))


def _check_push(push: str | None, private: bool) -> None:
    if push is not None:
        check_push(push)
    elif private:
        raise UserError(
            "--private without --push", "a directory has no readers to choose", "leave it out, or add --push"
        )


def _check_target(path: Path, target: Path | None, dtype: str) -> None:
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}", f"weights are written as {', '.join(DTYPES)}", "choose one of these")
    if target is not None and target.exists():
        raise UserError(f"{target} exists", "an export does not overwrite", "remove it, or choose another directory")
    if target is None and path.exists() and not (path / "checkpoints").is_dir():
        raise UserError(
            f"{path} is no run directory, and no target is given",
            "only a run has a default target: its own export/",
            "name the target: windlass export PATH TARGET",
        )


def _write_weights(
    draft: Path, saved: SavedModel, is_adapter: bool, dtype: str, max_shard_bytes: int
) -> tuple[SavedModel, Merging | None]:
    """-> the plain model of what was written."""
    if is_adapter:
        write_adapter(draft, saved)
        return merged_model(saved)
    saved, merging = merged_model(saved)
    save_weights(draft, saved.architecture, saved.model.named_parameters(), DTYPES[dtype], max_shard_bytes)
    keep_sampling(draft, _sampling_of_base(saved))
    return saved, merging


def keep(target: Path, draft: Path) -> list[str]:
    """Adds to `draft` the files of `target` that no export wrote (a template that the user added, a GGUF), except those whose
    name `draft` has -> their names. They are linked, not copied: one may be as large as the weights."""
    old = target if target.exists() else _old_place(target)  # there, where a kill came between the two renames
    if not old.is_dir():
        return []
    names = sorted(path.name for path in old.iterdir() if not any(fnmatchcase(path.name, one) for one in OWN_FILES))
    kept = [name for name in names if not (draft / name).exists()]
    for name in kept:
        if (old / name).is_dir() and not (old / name).is_symlink():
            shutil.copytree(old / name, draft / name, symlinks=True, copy_function=_link)
        else:
            _link(old / name, draft / name)
    return kept


def _link(source: Path | str, target: Path | str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, target, follow_symlinks=False)


def _old_place(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def replace(target: Path, draft: Path) -> None:
    """`draft` takes the place of `target`. A process that is killed in between leaves each of them whole, the old one beside its
    place, where the next export finds the place free."""
    old = _old_place(target)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    draft.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _sampling_of_base(saved: SavedModel) -> bytes | None:
    if saved.step is not None:
        return kept_base_files(saved.directory).get(KEPT_GENERATION)
    file = saved.directory / GENERATION
    return file.read_bytes() if file.is_file() else None


@torch.no_grad()
def compare_models(saved: SavedModel, directory: Path, dtype: torch.dtype, is_adapter: bool = False) -> float:
    """Largest difference of logits between our model, whose weights are given up, and `directory` loaded by transformers.
    Raises UserError where they disagree."""
    ours = saved.model.float()
    for parameter in ours.parameters():
        parameter.copy_(parameter.to(dtype))  # as the files have it, and in its own memory
    room, ids_BT = saved.architecture.max_positions, probe_ids(saved.architecture)
    length = ids_BT.shape[1]
    for _ in range(min(GREEDY_TOKENS, room - length)):
        ids_BT = torch.cat((ids_BT, ours(ids_BT)[:, -1:].argmax(-1)), 1)
    our_logits_BTV: Tensor = ours(ids_BT)
    if not our_logits_BTV.isfinite().all():
        raise UserError(
            f"the model of {saved.directory} computes NaN or infinity",
            "an export holds a model that works",
            "export an earlier step (--step); the run's events say when its numbers stopped being finite",
        )
    saved.model.to("meta")  # its memory goes before the other one comes
    if is_adapter:
        assert saved.base is not None
        theirs = load_with_peft(directory, saved.base, saved.architecture)
    else:
        # its default, grouped experts, takes only widths that are multiples of 4
        plain = {"experts_implementation": "eager"} if saved.architecture.sparse_layers else {}
        loaded: Any = auto_model().from_pretrained(directory, dtype=torch.float32, output_loading_info=True, **plain)
        theirs, report = loaded
        assert not report["missing_keys"] and not report["unexpected_keys"], report
    their_logits_BTV = theirs(input_ids=ids_BT).logits
    difference = (our_logits_BTV - their_logits_BTV).abs().max().item()
    same = difference <= LOGIT_TOLERANCE * max(1.0, our_logits_BTV.abs().max().item())
    if not same or not torch.equal(their_logits_BTV[:, length - 1 : -1].argmax(-1), ids_BT[:, length:]):
        raise UserError(
            f"transformers computes another model from the exported files (logits differ by {difference:.1e})",
            f"logits agree within {LOGIT_TOLERANCE:.0e} of the largest, and the greedy text is the same",
            "nothing was exported; report this with the recipe and the version of transformers",
        )
    return difference


def compare_tokenizers(directory: Path) -> None:
    """Raises UserError where transformers reads the tokenizer as another one than training did."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(directory)
    theirs.model_max_length = NO_LIMIT  # the probe is longer than a short context, and no model reads it
    ours = Tokenizer.from_file(str(directory / TOKENIZER_FILE)).encode(PROBE_TEXT, add_special_tokens=False).ids
    found = theirs(PROBE_TEXT, add_special_tokens=False)["input_ids"]
    if found != ours:
        at = next((at for at, pair in enumerate(zip(found, ours)) if pair[0] != pair[1]), min(len(found), len(ours)))
        raise UserError(
            f"transformers reads the exported tokenizer as another one ({type(theirs).__name__}: token {at} of a probe differs)",
            "a text has the ids that the model was trained on",
            f"nothing was exported; {_other_tokenizer(directory, type(theirs).__name__)}",
        )


def _other_tokenizer(directory: Path, taken: str) -> str:
    """What to do where transformers reads the tokenizer by the class `taken`; for some model types that is not what files say."""
    asked = json.loads((directory / CONFIG_FILE).read_text())["tokenizer_class"].removesuffix("Fast")
    if taken.removesuffix("Fast") == asked:
        return f"report this with {CONFIG_FILE} and the version of transformers"
    kind = json.loads((directory / "config.json").read_text())["model_type"]
    return (
        f"transformers takes {taken} for every model of type {kind}, whatever its files say: train another family (llama or "
        f"qwen3), or begin from a tokenizer that was made for {taken} (data.tokenizer.from)"
    )


def _sentence(difference: float, has_tokenizer: bool, is_adapter: bool, merging: Merging | None) -> str:
    nf4 = "" if merging is None or merging.in_nf4 is None else f" {IN_NF4.format(merging.in_nf4)}"
    if is_adapter:
        return (
            f"Before it was written here, PEFT loaded it beside its base: logits within {difference:.1e} of the merged model's "
            f"(fp32, {PROBE_TOKENS} tokens), the same greedy continuation.{nf4}"
        )
    ids = ", and the same token ids for a probe text" if has_tokenizer else "; there is no tokenizer here"
    beside = (
        ""
        if merging is None
        else f" Merged in fp32, it was within {merging.beside:.1e} of the logits of base and adapter."
    )
    return (
        f"Before it was written here, transformers loaded it: logits within {difference:.1e} of the training code's (fp32, "
        f"{PROBE_TOKENS} tokens), the same greedy continuation{ids}.{beside}{nf4}"
    )
