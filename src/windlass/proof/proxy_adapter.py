"""The adapter of a recipe in its proxy model, and the same adapter for the reference.

The proxy model begins with drawn factors, read from files of PEFT's: with B at 0, as training begins, A would have no gradient in
the first step. The reference gets the numbers that were drawn, not those files, so reading them is proved too.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from windlass.adapters.config import AdapterConfig
from windlass.adapters.peft_format import save_adapter
from windlass.config import RunConfig
from windlass.model.architecture import Architecture
from windlass.model.init import draw_block
from windlass.model.lora.adapter import BLOCK, A, Adapter, B, adapted_shapes, adapter_of, is_factor
from windlass.model.names import hugging_face_names, stored_tensor
from windlass.proof.reference_adapter import LowRank

RANK: Final = 3
ALPHA: Final = 5.0
WIDTH: Final = 0.1  # of drawn factors: their product is about as large as the matrix


def adapter_section(
    config: RunConfig, architecture: Architecture, small: Architecture, layers: list[int], directory: Path
) -> dict[str, Any]:
    """`adapter` of the proxy model's recipe, whose factors are written below `directory`. Matrix by matrix as the layer of the
    recipe's model that each layer of the proxy model represents."""
    adapter = adapter_of(config.adapter, architecture)
    if adapter is None:
        return {}
    given: dict[str, Any] = {
        "kind": config.adapter.kind,
        "rank": RANK,
        "alpha": ALPHA,
        "rank_stabilized": config.adapter.rank_stabilized,
        "base": config.adapter.base,
        "dropout": config.adapter.dropout,
    }
    everything = adapter_of(AdapterConfig(kind="lora"), small)
    assert everything is not None
    given["targets"] = sorted(name for name in everything.targets if represented(name, layers) in adapter.targets)
    names = hugging_face_names(small)
    also = [called[0] for name, called in names.items() if represented(name, layers) in adapter.also_trained]
    if also:
        given["also_train"] = sorted(set(also))
    made = AdapterConfig.model_validate(given)
    whole = adapter_of(made, small)
    assert whole is not None
    save_adapter(directory, made, small, whole, drawn_factors(small, whole), "model")
    return given | {"from": str(directory)}


def widened(architecture: Architecture, tp: int) -> Architecture:
    """With rows that NF4 can store, and whose parts on tp ranks are whole blocks too."""
    is_square = architecture.num_heads * architecture.head_dim == architecture.hidden_size
    hidden = architecture.num_heads * BLOCK if is_square else BLOCK
    return replace(architecture, head_dim=BLOCK, hidden_size=hidden, intermediate_size=3 * BLOCK * tp)


def drawn_factors(architecture: Architecture, adapter: Adapter) -> dict[str, torch.Tensor]:
    """Every factor, whole, in fp32."""
    shapes = adapted_shapes(architecture, adapter)
    return {
        name: draw_block(f"factor/{name}", 0)[: math.prod(shape)].view(shape) * WIDTH
        for name, shape in shapes.items()
        if is_factor(name)
    }


def proxy_reference(config: RunConfig, architecture: Architecture) -> LowRank | None:
    """The reference's adapter, equal to the proxy's; None without one."""
    adapter = adapter_of(config.adapter, architecture)
    if adapter is None:
        return None
    return low_rank(config.adapter, architecture, adapter, drawn_factors(architecture, adapter))


def low_rank(
    config: AdapterConfig, architecture: Architecture, adapter: Adapter, values: Mapping[str, torch.Tensor]
) -> LowRank:
    """`values`: every factor, whole, by our names."""
    factors: dict[str, list[dict[str, torch.Tensor]]] = {}
    for name in values:
        if name.endswith(A):
            module = name.removesuffix(f".{A}")
            pair = [f"{module}.{kind}" for kind in (A, B)]
            factors.setdefault(_stored(module, architecture), []).append({one: values[one] for one in pair})
    in_nf4 = sorted({_stored(module, architecture) for module in adapter.quantized})
    return LowRank(config.scale, factors, in_nf4, config.also_train)


def _stored(module: str, architecture: Architecture) -> str:
    return stored_tensor(f"{module}.weight", architecture).name.removesuffix(".weight")


def represented(name: str, layers: list[int]) -> str:
    """The parameter or module of the model that one of the proxy model represents."""
    before, dot, rest = name.partition(".layers.")
    if not dot:
        return name
    at, _, inner = rest.partition(".")
    return f"{before}.layers.{layers[int(at)]}.{inner}"
