"""A checkpoint as a Hugging Face directory that other tools load: config, generation config, safetensors, tokenizer.

It is written beside its place, loaded back by transformers, compared (logits of fp32 weights within 1e-5, and the greedy text),
and only then renamed: a directory called export/ is one that works.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from windlass.errors import UserError
from windlass.jobs.saved import Saved, open_saved
from windlass.model.hf import save_weights
from windlass.model.transformer import Decoder

MAX_SHARD_BYTES = 5_000_000_000  # transformers' own limit per safetensors file
LOGIT_TOLERANCE = 1e-5  # fp32: transformers computes the same formula in another order
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PROBE_TOKENS = GREEDY_TOKENS = (
    16  # enough positions that a wrong rope or mask shows; a large model still answers in seconds
)


@dataclass(frozen=True)
class Exported:
    directory: Path
    step: int | None
    largest_difference: float
    """Between our logits and transformers' on a probe, in the dtype that was written."""


def export(path: Path, target: Path | None = None, *, step: int | None = None, dtype: str = "fp32") -> Exported:
    """Writes `target` (default: export/ in the run directory). Raises UserError; a target that exists is never overwritten
    unless it is the default one."""
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}", f"weights are written as {', '.join(DTYPES)}", "choose one of these")
    if target is not None and target.exists():
        raise UserError(f"{target} exists", "an export does not overwrite", "remove it, or choose another directory")
    if target is None and not (path / "checkpoints").is_dir():
        raise UserError(
            f"{path} is no run directory, and no target is given",
            "only a run has a place for its export: its own export/",
            "name the target: windlass export PATH TARGET",
        )
    saved = open_saved(path, step)
    target = target or path / "export"
    draft = target.parent / f".{target.name}.draft"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        save_weights(draft, saved.architecture, saved.model.named_parameters(), DTYPES[dtype], MAX_SHARD_BYTES)
        for file in sorted(saved.tokenizer_directory.glob("*token*")) + sorted(
            saved.tokenizer_directory.glob("*.jinja")
        ):
            shutil.copyfile(file, draft / file.name)
        difference = compare(saved, draft, DTYPES[dtype])
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # what did not compare equal is not left behind
    return Exported(target, saved.step, difference)


@torch.no_grad()
def compare(saved: Saved, directory: Path, dtype: torch.dtype) -> float:
    """Largest difference of logits between our model and the directory loaded by transformers. Raises where they disagree."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    theirs, report = loaded
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    ours = saved.model.to(dtype)
    generator = torch.Generator().manual_seed(0)
    room = saved.architecture.max_positions
    length = min(PROBE_TOKENS, max(1, room - GREEDY_TOKENS))
    ids_BT = torch.randint(0, saved.architecture.vocab_size, (2, length), generator=generator)
    logits_BTV = ours(ids_BT)
    difference = (logits_BTV - theirs(ids_BT).logits).abs().max().item()
    if not logits_BTV.isfinite().all():
        raise UserError(
            f"the model of {saved.directory} computes NaN or infinity",
            "an export holds a model that works",
            "export an earlier step (--step); the run's events say when its numbers stopped being finite",
        )
    if dtype == torch.float32:
        _same_text(ours, theirs, ids_BT, min(GREEDY_TOKENS, room - length), difference)
    return difference


def _same_text(ours: Decoder, theirs: Any, ids_BT: torch.Tensor, num_tokens: int, difference: float) -> None:
    """Raises where fp32 logits differ by more than rounding, or the greedy continuation is another."""
    same = difference <= LOGIT_TOLERANCE * max(1.0, ours(ids_BT).abs().max().item())
    for _ in range(num_tokens):
        next_B1 = theirs(ids_BT).logits[:, -1:].argmax(-1)
        same = same and torch.equal(next_B1, ours(ids_BT)[:, -1:].argmax(-1))
        ids_BT = torch.cat((ids_BT, next_B1), 1)
    if not same:
        raise UserError(
            f"transformers computes another model from the exported files (logits differ by {difference:.1e})",
            f"logits agree within {LOGIT_TOLERANCE:.0e} of the largest, and the greedy text is the same",
            "nothing was exported; report this with the recipe and the version of transformers",
        )
