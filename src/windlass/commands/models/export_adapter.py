"""A checkpoint of an adapter on its way out: merged into its base, or as PEFT's files beside it.

Both start from the base as its files have it, in fp32: W + s B A is computed there, compared with W and s B A beside each other,
and rounded once, when it is written. An adapter that was trained beside an NF4 base is merged into the base before it was
quantised, so the merged model is not the one that was trained; console and card give the difference.
"""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from windlass.adapters.peft_format import save_adapter
from windlass.config import check_recipe
from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.lora.adapter import is_factor
from windlass.model.lora.linear import merge
from windlass.output import silent_imports
from windlass.training.start.open_saved import SavedModel, empty, weights_of

LOGIT_TOLERANCE = 1e-5  # fp32: the same formula in another order
PROBE_TOKENS = 16  # enough positions that a wrong rope or mask shows; a large model answers in seconds
IN_NF4 = (
    "The base was quantised to NF4 in training. Here the adapter belongs to the base as it was before, whose matrices differ "
    "from those by the rounding to four bits: logits differ by {:.1e} from the trained model's (fp32, 16 tokens)."
)


@dataclass(frozen=True)
class Merging:
    """Largest differences of logits on a probe, in fp32."""

    beside: float
    """Between the merged model and the base of the files with the adapter's factors beside it."""
    in_nf4: float | None
    """Between the merged model and the trained one, where that has its base in NF4."""


@torch.no_grad()
def merged_model(saved: SavedModel) -> tuple[SavedModel, Merging | None]:
    """The plain model of `saved` and its adapter, in fp32, and its distances; `saved` gives up its memory. A model without an
    adapter is returned as it is. Raises UserError where merging changes what is computed."""
    if saved.adapter is None or saved.base is None:
        return saved, None
    trained, quantized = trained_tensors(saved), saved.adapter.quantized
    ids_BT = probe_ids(saved.architecture)
    quantized_logits = saved.model(ids_BT) if quantized else None
    saved.model.to("meta")
    model = empty(saved.architecture, torch.float32, replace(saved.adapter, quantized=frozenset()))
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    weights_of(saved.base, saved.architecture)(named)
    for name, tensor in trained.items():
        named[name].copy_(tensor)
    logits = model(ids_BT)
    merge(model, trained, saved.adapter)
    merged_logits = model(ids_BT)
    largest = (merged_logits - logits).abs().max().item()
    if largest > LOGIT_TOLERANCE * max(1.0, logits.abs().max().item()):
        raise UserError(
            f"merging the adapter of {saved.directory} changes logits by {largest:.1e}",
            f"the merged model computes what base and adapter compute, within {LOGIT_TOLERANCE:.0e} of the largest",
            "nothing was exported; export the adapter without --merge, and report this with the recipe",
        )
    from_trained = None if quantized_logits is None else (merged_logits - quantized_logits).abs().max().item()
    return replace(saved, model=model), Merging(largest, from_trained)


def check_merge(saved: SavedModel, dtype: str, merge: bool) -> None:
    """Raises UserError for options that do not fit what is exported."""
    if merge and saved.adapter is None:
        raise UserError(
            f"--merge with {saved.directory}",
            "an adapter is merged into its base, and this model has none",
            "leave --merge out: the whole model is exported",
        )
    if saved.adapter is not None and saved.step is None and not merge:
        raise UserError(
            f"{saved.directory} is already an adapter in PEFT's format",
            "an exported adapter has this format",
            "use it as it is, or export the whole model with --merge",
        )
    if saved.adapter is not None and not merge and dtype != "fp32":
        raise UserError(
            f"--dtype {dtype} for an adapter",
            "an adapter's factors are exported in fp32, as they were trained",
            "leave --dtype out, or export the whole model with --merge",
        )


def probe_ids(architecture: Architecture) -> torch.Tensor:
    """[2, 16] ids that are no text, or fewer where 16 more have no room."""
    length = min(PROBE_TOKENS, max(1, architecture.max_positions - PROBE_TOKENS))
    return torch.randint(0, architecture.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))


def trained_tensors(saved: SavedModel) -> dict[str, torch.Tensor]:
    """Factors, and what is trained whole, on the CPU in fp32."""
    assert saved.adapter is not None
    also = saved.adapter.also_trained
    named = saved.model.named_parameters()
    return {name: tensor.detach().float() for name, tensor in named if is_factor(name) or name in also}


def write_adapter(draft: Path, saved: SavedModel) -> None:
    """PEFT's two files in `draft`. They name a base on this host by its whole path, so that it is found from any directory."""
    assert saved.adapter is not None
    config = check_recipe(saved.trainer_state["config"])
    base = saved.trainer_state["base"]
    path = Path(base["from"]).expanduser()
    name = str(path.resolve()) if path.is_dir() else base["from"]
    tensors = trained_tensors(saved)
    save_adapter(draft, config.adapter, saved.architecture, saved.adapter, tensors, name, base["files"])


def auto_model() -> Any:
    """transformers' AutoModelForCausalLM, which loads without a word."""
    with silent_imports():  # of torchao too, where that is installed
        import transformers.modeling_utils
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return transformers.AutoModelForCausalLM


def load_with_peft(draft: Path, base: Path, architecture: Any) -> Any:
    """transformers' model with the adapter of `draft`, by PEFT. Raises UserError where PEFT is not installed."""
    try:
        from peft import PeftModel
    except ImportError:
        raise UserError(
            "an adapter is exported, and peft is not installed",
            "an export is loaded back and compared before it is finished; PEFT loads an adapter",
            "pip install 'windlass-lm[peft]', or export the merged model with --merge",
        ) from None
    plain = {"experts_implementation": "eager"} if architecture.sparse_layers else {}
    model = auto_model().from_pretrained(base, dtype=torch.float32, **plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of names that PEFT still uses of transformers
        return PeftModel.from_pretrained(model, draft).eval()
