"""Who sees whom: all that attention needs of a row besides queries, keys and values."""

from dataclasses import dataclass

from torch import Tensor

from windlass.model.attention.context import Context
from windlass.model.attention.documents import Documents
from windlass.model.chunks import USUAL, Chunks


@dataclass(frozen=True)
class AttentionLayout:
    """Query t is at position query_offset + t among the keys 0..S-1, and sees of its own document the last `window`
    keys up to itself. Without documents a row is one. Of ranks that share heads or positions, for the masks of dropout: which
    heads these are, which positions of the row matrices read here (`row_T`), and which the residual stream has. `context`: the
    ranks that share the row; `slice_documents`: the documents that this rank's slices of it meet, where it computes slices.
    `chunks`: how many weights exist at a time where they are materialised. `cap`: scores s become cap tanh(s / cap)."""

    query_offset: int = 0
    window: int | None = None
    documents: Documents | None = None
    heads_H: Tensor | None = None
    row_T: Tensor | None = None
    stream_T: Tensor | None = None
    context: Context | None = None
    slice_documents: tuple[Documents, ...] = ()
    chunks: Chunks = USUAL
    cap: float | None = None
