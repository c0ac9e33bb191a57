"""A checkpoint of an adapter on its way out: merged into its base, or as PEFT's files beside it.

Both start from the base as its files have it, in fp32: W + s B A is computed there and rounded once, when it is written. An
adapter that was trained beside an NF4 base is merged into the base before it was quantised, so the merged model is not bit for
bit the one that was trained; the card says so.
"""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from windlass.adapters.peft_format import save_adapter
from windlass.config import check_recipe
from windlass.errors import UserError
from windlass.model.lora.adapter import is_factor
from windlass.model.lora.linear import merge
from windlass.training.open_saved import SavedModel, empty, weights_of

IN_NF4 = (
    "The base was quantised to NF4 in training. Here the adapter belongs to the base as it was before, whose matrices differ "
    "from those by the rounding to four bits."
)


def merged(saved: SavedModel) -> SavedModel:
    """The plain model that `saved` and its adapter make together, in fp32; `saved` gives up its memory. A model without an
    adapter is returned as it is."""
    if saved.adapter is None or saved.base is None:
        return saved
    trained = trained_tensors(saved)
    saved.model.to("meta")
    model = empty(saved.architecture, torch.float32)
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    weights_of(saved.base, saved.architecture)(named)
    with torch.no_grad():
        for name, tensor in trained.items():
            if not is_factor(name):
                named[name].copy_(tensor)
    merge(model, trained, saved.adapter)
    return replace(saved, model=model)


def trained_tensors(saved: SavedModel) -> dict[str, torch.Tensor]:
    """Factors, and what is trained whole, on the CPU in fp32."""
    assert saved.adapter is not None
    also = saved.adapter.also_trained
    named = saved.model.named_parameters()
    return {name: tensor.detach().float() for name, tensor in named if is_factor(name) or name in also}


def write_adapter(draft: Path, saved: SavedModel) -> None:
    """PEFT's two files in `draft`."""
    assert saved.adapter is not None
    config = check_recipe(saved.trainer_state["config"])
    base = saved.trainer_state["base"]["from"]
    tensors = trained_tensors(saved)
    save_adapter(draft, config.adapter, saved.architecture, saved.adapter, tensors, base)


def load_with_peft(draft: Path, base: Path, architecture: Any) -> Any:
    """transformers' model with the adapter of `draft`, by PEFT. Raises UserError where PEFT is not installed."""
    try:
        from peft import PeftModel
    except ImportError:
        raise UserError(
            "an adapter is exported, and peft is not installed",
            "an export is loaded back and compared before it is there, an adapter by PEFT",
            "pip install peft, or export the merged model with --merge",
        ) from None
    from transformers import AutoModelForCausalLM

    plain = {"experts_implementation": "eager"} if architecture.sparse_layers else {}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of names that PEFT still uses of transformers
        return PeftModel.from_pretrained(model, draft).eval()
