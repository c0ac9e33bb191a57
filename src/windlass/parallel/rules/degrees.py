"""Which sizes of `tp` and `context` a model and a recipe allow. No torch: recipes are checked before it is imported.

Every tensor rank computes whole query heads with their key/value heads, whole channels of the MLP, whole rows of the vocabulary
and, since the residual stream is cut by positions, an equal part of each sequence. So tp divides the number of each; only of
key/value heads there may be fewer than ranks, several of which then compute the same one. A context rank has two equal slices of
each sequence, of which tp cuts each rank's part again; with ulysses it computes whole heads too.
"""

import importlib.metadata
import math
from collections.abc import Iterator

from windlass.errors import UserError
from windlass.model.architecture import Architecture, divisors
from windlass.model.lora.adapter import BLOCK


def degree_errors(tp: int, architecture: Architecture) -> Iterator[UserError]:
    """Where tp ranks cannot share this model's matrices evenly; names the sizes that can."""
    counts = _counts(tp, architecture)
    wrong = [f"{count} {what}" for what, count in counts.items() if count % tp]
    if wrong:
        legal = [str(n) for n in range(1, max(counts.values()) + 1) if _divides(n, architecture)]
        yield UserError(
            f"parallel.tp={tp} for a model of {' and '.join(wrong)}",
            "each of tp ranks computes an equal part of all of "
            + ", ".join(f"{n} {what}" for what, n in counts.items()),
            f"use parallel.tp={' or '.join(legal)}",
        )


def _divides(tp: int, architecture: Architecture) -> bool:
    return all(count % tp == 0 for count in _counts(tp, architecture).values())


def _counts(tp: int, architecture: Architecture) -> dict[str, int]:
    """What tp divides, by its name. Of fewer key/value heads than ranks several ranks compute the same one, if their number
    divides tp, and no norm goes over all of them."""
    kv_heads = architecture.num_kv_heads
    is_shared = tp > kv_heads and tp % kv_heads == 0 and not architecture.qk_norm_whole
    return {
        "query heads": architecture.num_heads,
        **({} if is_shared else {"key/value heads": kv_heads}),
        **_channels(architecture),
        "rows of the vocabulary (padded)": architecture.padded_vocab_size,
    }


def _channels(architecture: Architecture) -> dict[str, int]:
    """The channels of the kinds of MLP that the model has."""
    num_sparse = len(architecture.sparse_layers)
    mlp = {"channels of the MLP": architecture.intermediate_size} if num_sparse < architecture.num_layers else {}
    return mlp | ({"channels of each expert": architecture.expert_size} if num_sparse else {})


def nf4_errors(tp: int, architecture: Architecture) -> Iterator[UserError]:
    """Where a tensor rank's part of a row is not whole blocks of NF4: rows of o and down are cut over tp."""
    inputs = {
        "heads x channels": architecture.num_heads * architecture.head_dim,
        "channels of the MLP": architecture.intermediate_size,
    }
    wrong = [f"{size} {what}" for what, size in inputs.items() if size // tp % BLOCK]
    if tp > 1 and wrong:
        legal = [n for n in range(1, tp) if all(size % (n * BLOCK) == 0 for size in inputs.values())]
        yield UserError(
            f"adapter.base=nf4 with parallel.tp={tp} for a model of {' and '.join(wrong)}",
            f"NF4 keeps one scale for {BLOCK} consecutive elements of a row, so each rank's part of it is whole blocks",
            f"use parallel.tp={' or '.join(map(str, legal))}, or adapter.base=plain"
            if legal
            else "use adapter.base=plain",
        )


def context_errors(context: int, kind: str) -> Iterator[UserError]:
    """Settings that have no effect without context ranks."""
    if context == 1 and kind != "allgather":
        yield UserError(
            f"parallel.context_kind={kind} with parallel.context=1",
            "context_kind says how ranks that share a sequence exchange, and here each has whole sequences",
            "remove parallel.context_kind, or use parallel.context=2 or more",
        )


def head_errors(context: int, kind: str, tp: int, architecture: Architecture) -> Iterator[UserError]:
    """Where ulysses cannot deal the query heads out evenly; names the sizes that can."""
    if _deals_heads(context, kind, tp, architecture):
        return
    heads = architecture.num_heads // tp
    sizes = " or ".join(str(size) for size in divisors(heads) if size > 1)
    by_tp = f", {heads} on each of parallel.tp={tp} ranks" if tp > 1 else ""
    yield UserError(
        f"parallel.context={context} with parallel.context_kind=ulysses for a model of {architecture.num_heads} query heads"
        + by_tp,
        "with ulysses each context rank computes an equal number of query heads",
        f"use parallel.context={sizes}, or parallel.context_kind=allgather, which asks nothing of heads"
        if sizes
        else "use parallel.context_kind=allgather, which asks nothing of heads",
    )


def _deals_heads(context: int, kind: str, tp: int, architecture: Architecture) -> bool:
    return kind != "ulysses" or architecture.num_heads // tp % context == 0


def exchange_errors(context: int, kind: str, is_compiled: bool) -> Iterator[UserError]:
    """Where the installed torch compiles an exchange wrongly. Measured: 2.11 on CPU, fp32 and fp64: the loss is right and
    gradients are off by 0.05, without an error; 2.13 is exact."""
    version = importlib.metadata.version("torch")
    if context > 1 and kind == "ulysses" and is_compiled and tuple(map(int, version.split(".")[:2])) < (2, 13):
        yield UserError(
            f"parallel.context_kind=ulysses with parallel.compile=true and torch {version}",
            "compiled by a torch before 2.13 the exchange of heads gives wrong gradients",
            "install torch 2.13, or use parallel.context_kind=allgather or parallel.compile=false",
        )


def position_errors(
    tp: int,
    length: int,
    context: int = 1,
    kind: str = "allgather",
    architecture: Architecture | None = None,
    is_fixed: bool = False,
) -> Iterator[UserError]:
    """Where sequences of `length` tokens cannot be cut over context ranks, and each part over tp ranks. Names
    sizes that can, of those that the model allows where it is known, and the nearest lengths, unless the length `is_fixed`."""
    unit = _unit(tp, context)
    if length % unit == 0:
        return
    changes = []
    if context > 1 and (contexts := _contexts(tp, length, context, kind, architecture)):
        changes.append(f"parallel.context={' or '.join(map(str, contexts))}")
    if tp > 1 and (tps := _tps(tp, length, context, kind, architecture)):
        changes.append(f"parallel.tp={' or '.join(map(str, tps))}")
    below = length // unit * unit
    longest = below + unit if architecture is None else architecture.max_positions
    near = [str(n) for n in (below, below + unit) if 0 < n <= longest]
    if near and not is_fixed:
        changes.append(f"data.sequence_length={' or '.join(near)} (the nearest that divide)")
    beside = [f"parallel.{axis}={size}" for axis, size in (("context", context), ("tp", tp)) if size > 1]
    rule = "the residual stream is cut over tp by positions, in equal parts"
    if context > 1:
        rule = "each context rank has two equal slices of a sequence"
        rule += ", and tp cuts them again in equal parts" * (tp > 1)
    yield UserError(
        f"data.sequence_length={length} with {' and '.join(beside)}",
        f"{rule}: a length is a multiple of {unit}",
        f"use {', or '.join(changes) or 'parallel.context=1 and parallel.tp=1'}",
    )


def length_errors(length: int, architecture: Architecture) -> Iterator[UserError]:
    """A sequence longer than the model's positions."""
    if length > architecture.max_positions:
        yield UserError(
            f"data.sequence_length={length} for a model of {architecture.max_positions} positions",
            "a sequence is no longer than the model's positions",
            f"use data.sequence_length={architecture.max_positions} or less, or a model with more positions",
        )


def _unit(tp: int, context: int) -> int:
    """What a sequence's length must be a multiple of."""
    return tp if context == 1 else context * math.lcm(2, tp)


def _contexts(tp: int, length: int, context: int, kind: str, architecture: Architecture | None) -> list[int]:
    """Sizes of context, up to twice the given one, that length, tp and model allow."""
    first = 2 if kind == "ulysses" else 1
    legal = [n for n in range(first, min(2 * context, length) + 1) if length % _unit(tp, n) == 0]
    return [n for n in legal if architecture is None or _deals_heads(n, kind, tp, architecture)]


def _tps(tp: int, length: int, context: int, kind: str, architecture: Architecture | None) -> list[int]:
    """Sizes of tp, up to twice the given one, that length, context and model allow."""
    legal = [n for n in range(1, min(2 * tp, length) + 1) if length % _unit(n, context) == 0]
    if architecture is None:
        return legal
    return [n for n in legal if _divides(n, architecture) and _deals_heads(context, kind, n, architecture)]
