"""Which matrices of a model carry low-rank factors, which are stored in four bits, and what is trained. No torch.

    y = W x + b + s B (A x)          A [r, in], B [out, r]

Factors are named as PEFT names them, behind its prefix: `model.layers.0.self_attn.q_proj.lora_A.weight`. A matrix in NF4 has
`codes` and `scales` in place of its `weight` (nf4.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from windlass.adapters.config import AdapterConfig
from windlass.errors import UserError, nearest
from windlass.model.architecture import Architecture, parameter_shapes
from windlass.model.names import hugging_face_names, stored_tensor
from windlass.other_names.target_names import named_by

A, B = "lora_A.weight", "lora_B.weight"
CODES, SCALES = "codes", "scales"
BLOCK: Final = 64
"""Elements of a row that share a scale in NF4."""


@dataclass(frozen=True)
class Adapter:
    """A recipe's `adapter`, resolved for one model. Names are those of modules (`model.layers.0.self_attn.q_proj`)."""

    rank: int
    scale: float
    dropout: float
    """Probability that an element of a factor's input is zeroed in training."""
    targets: frozenset[str]
    """Matrices with factors."""
    quantized: frozenset[str]
    """Matrices in NF4."""
    also_trained: frozenset[str]
    """Parameters of the base that are trained whole."""


def adapter_of(config: AdapterConfig, arch: Architecture) -> Adapter | None:
    """None where all parameters are trained. Raises UserError for names that the model does not have."""
    if config.kind == "none":
        return None
    matrices = _matrices(arch)
    also = _also_trained(config, arch)
    chosen = [name for name in matrices if f"{name}.weight" not in also]
    targets = [name for name in chosen if config.targets == "all-linear" or _is_named(name, config.targets, arch)]
    if config.targets != "all-linear":
        _check_targets(config.targets, matrices, chosen, arch)
    elif not targets:
        raise UserError(
            f"adapter.targets=all-linear and adapter.also_train={config.also_train}",
            "an adapter has at least one matrix with factors, and these patterns train all of them whole",
            'narrow adapter.also_train, for example to ["*norm*"]; or leave the section `adapter` out to train all parameters',
        )
    _check_rank(config, arch, targets)
    quantized = chosen if config.base == "nf4" else []
    if config.base == "nf4":
        _check_nf4(arch, quantized)
    return Adapter(config.rank, config.scale, config.dropout, frozenset(targets), frozenset(quantized), also)


def adapted_shapes(arch: Architecture, adapter: Adapter | None, *, padded: bool = False) -> dict[str, tuple[int, ...]]:
    """parameter_shapes, with the factors behind their matrices, and NF4's two tensors in place of a weight."""
    shapes = parameter_shapes(arch, padded=padded)
    if adapter is None:
        return shapes
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or module not in adapter.targets | adapter.quantized:
            found[name] = shape
            continue
        rows, columns = shape
        if module in adapter.quantized:
            found |= {f"{module}.{CODES}": (rows, columns // 2), f"{module}.{SCALES}": (rows, columns // BLOCK)}
        else:
            found[name] = shape
        if module in adapter.targets:
            found |= {f"{module}.{A}": (adapter.rank, columns), f"{module}.{B}": (rows, adapter.rank)}
    return found


def is_factor(name: str) -> bool:
    return name.endswith((f".{A}", f".{B}"))


def trained_shapes(arch: Architecture, adapter: Adapter | None) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters that may be trained: all of them, or factors and `also_train`."""
    shapes = adapted_shapes(arch, adapter)
    if adapter is None:
        return shapes
    return {name: shape for name, shape in shapes.items() if is_factor(name) or name in adapter.also_trained}


def frozen_base(arch: Architecture, adapter: Adapter | None) -> frozenset[str]:
    """The parameters that an adapter freezes."""
    return frozenset(adapted_shapes(arch, adapter)) - frozenset(trained_shapes(arch, adapter))


def called(arch: Architecture, adapter: Adapter | None) -> dict[str, tuple[str, ...]]:
    """Every parameter that may be trained -> the names that a user may call it by."""
    if adapter is None:
        return hugging_face_names(arch)
    base = hugging_face_names(arch)
    names = trained_shapes(arch, adapter)
    return {name: (_factor_name(name, arch),) if is_factor(name) else base[name] for name in names}


def _factor_name(name: str, arch: Architecture) -> str:
    module, factor, kind = name.rsplit(".", 2)
    return f"{stored_tensor(f'{module}.weight', arch).name.removesuffix('.weight')}.{factor}.{kind}"


def _matrices(arch: Architecture) -> list[str]:
    """The matrices of attention and MLPs. Experts are one tensor for all of a layer and the router is small: neither is one."""
    names = [name for name, shape in parameter_shapes(arch).items() if ".layers." in name and len(shape) == 2]
    return [name.removesuffix(".weight") for name in names if name.endswith("_proj.weight")]


def _is_named(module: str, targets: list[str], arch: Architecture) -> bool:
    return any(_ends_with(name, target) for name in _names(module, arch) for target in targets)


def _names(module: str, arch: Architecture) -> Iterator[str]:
    yield module
    yield stored_tensor(f"{module}.weight", arch).name.removesuffix(".weight")


def _ends_with(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _check_targets(targets: list[str], matrices: list[str], chosen: list[str], arch: Architecture) -> None:
    for target in targets:
        named = [module for module in matrices if _is_named(module, [target], arch)]
        if named and not set(named) & set(chosen):
            raise UserError(
                f"adapter.targets names {target}, and adapter.also_train too",
                "a matrix is trained whole, or by its factors",
                f"remove {target} from one of them",
            )
        if named:
            continue
        choices = list(dict.fromkeys(name.rpartition(".")[2] for module in matrices for name in _names(module, arch)))
        meant = named_by(target, [name for module in matrices for name in _names(module, arch)])
        has_experts = arch.num_experts > 0 and target in ("gate_proj", "up_proj", "down_proj")
        raise UserError(
            f"adapter.targets has {target!r}",
            "this model's MLPs are experts, which are one tensor for all of a layer and carry no factors"
            if has_experts
            else "targets are the last parts of names of matrices in attention and MLP; regular expressions are not supported",
            f"write what this one finds here: {', '.join(meant)}"
            if meant
            else nearest(target, choices) + f"choose from {', '.join(choices)}",
        )


def _check_rank(config: AdapterConfig, arch: Architecture, targets: list[str]) -> None:
    shapes = parameter_shapes(arch)
    widest = max((shapes[f"{module}.weight"] for module in targets), key=min, default=None)
    if widest is not None and config.from_ is None and config.rank > min(widest):
        raise UserError(
            f"adapter.rank={config.rank} for matrices of at most {widest[0]} x {widest[1]}",
            "s B A has no higher rank than the matrix beside it, which its factors would outgrow",
            "use 8 or 16; or leave the section `adapter` out to train all parameters",
        )


def _also_trained(config: AdapterConfig, arch: Architecture) -> frozenset[str]:
    found = set()
    names = hugging_face_names(arch)
    for pattern in config.also_train:
        own = [name for name, called in names.items() if any(fnmatchcase(one, pattern) for one in (name, *called))]
        if not own:
            raise UserError(
                f"adapter.also_train has {pattern!r}",
                f"a pattern matches at least one of the model's {len(names)} parameter names, and this one matches none",
                nearest(pattern, [one for called in names.values() for one in called]) + 'for example ["*norm*"]',
            )
        found.update(own)
    return frozenset(found)


def _check_nf4(arch: Architecture, modules: list[str]) -> None:
    if arch.num_experts:
        raise UserError(
            f"adapter.base=nf4 for a model of {arch.num_experts} experts",
            "most of its weights are in the experts, which are not stored in four bits",
            "use adapter.base=plain",
        )
    shapes = parameter_shapes(arch)
    wrong = {shapes[f"{module}.weight"][1] for module in modules if shapes[f"{module}.weight"][1] % BLOCK}
    if wrong:
        raise UserError(
            f"adapter.base=nf4 for matrices of {' and '.join(map(str, sorted(wrong)))} inputs",
            f"NF4 keeps one scale for {BLOCK} consecutive elements of a row, so a row is whole blocks",
            "use adapter.base=plain",
        )
