"""Spans of time as sorted arrays: their union, its length, and the length of what two unions have in common."""

import numpy as np
import numpy.typing as npt

Spans = npt.NDArray[np.float64]
"""Shape (spans, 2): begin and end, in any unit; of a union sorted, and no two touch."""


def union(spans: Spans) -> Spans:
    """The times that some span covers, each counted once."""
    if not len(spans):
        return spans.reshape(0, 2)
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(spans[:, 1])
    is_first = np.r_[True, spans[1:, 0] > ends[:-1]]
    first = np.flatnonzero(is_first)
    return np.stack([spans[first, 0], ends[np.r_[first[1:] - 1, len(spans) - 1]]], axis=1)


def length(spans: Spans) -> float:
    """The total length of the spans of a union."""
    return float((spans[:, 1] - spans[:, 0]).sum())


def common(one: Spans, other: Spans) -> float:
    """How long both are under way."""
    return length(union(one)) + length(union(other)) - length(union(np.concatenate([one, other])))


def clipped(spans: Spans, begin: float, end: float) -> Spans:
    """Cut to [begin, end]."""
    spans = np.clip(spans, begin, end)
    return spans[spans[:, 1] > spans[:, 0]]
