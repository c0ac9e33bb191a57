"""One number per token: an id, and what preparation knows of it besides.

A document travels through preparation as one array of ids with EOS as its last element only. So an id of a conversation or a pair
may carry flags:

    MASKED        it is no target
    INNER         it is an EOS that ends a turn, not a document
    CHOSEN_END    it is the EOS between the two answers of a pair (preferences)
    WORDS         of a conversation: it is of the words of a message that is no answer, which may be cut (fitting)
    UNWRITTEN     the document's answer number k holds this field, and the template does not write it; on the k-th id

`labelled` removes the flags when samples are made. Ids are below 2^24. Where answers have fractions as weights, they are int64:
the bits from PERCENT_AT on hold by how many percent less than a whole the *next* id weighs as a target. So the last one is EOS
itself still.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from windlass.data.batch_fields import NOT_COUNTED
from windlass.data.packing import WHOLE

UNWRITTEN: Final = {"name": 1 << 24, "reasoning_content": 1 << 25, "thinking": 1 << 26, "tool_calls": 1 << 27}
UNWRITTEN_BITS: Final = sum(UNWRITTEN.values())
CHOSEN_END: Final = 1 << 28
WORDS: Final = CHOSEN_END  # no document is both a pair and a conversation, and int32 has no other bit left
MASKED: Final = 1 << 29
INNER: Final = 1 << 30
ID_BITS: Final = (1 << 24) - 1
PERCENT_AT: Final = 32


def flagged(
    ids_N: np.ndarray,
    is_learned_N: np.ndarray,
    eos_id: int,
    unwritten: Sequence[Sequence[str]] = (),
    is_words_N: np.ndarray | None = None,
    percent_N: np.ndarray | None = None,
) -> np.ndarray:
    """One number per token; the last one is EOS itself, and no other is equal to it. `unwritten`: per answer, the fields that the
    template does not write; `is_words_N`: which ids are WORDS; `percent_N`: how much each id weighs, where not all weigh 100."""
    is_inner_N = ids_N == eos_id
    is_inner_N[-1] = False
    marked: np.ndarray = ids_N | np.where(is_learned_N, 0, MASKED) | np.where(is_inner_N, INNER, 0)
    assert len(unwritten) < len(ids_N)
    if is_words_N is not None:
        marked |= np.where(is_words_N, WORDS, 0)
    for number, fields in enumerate(unwritten):
        marked[number] |= sum(UNWRITTEN[field] for field in fields)
    if percent_N is None:
        return marked.astype(np.int32)
    marked = marked.astype(np.int64)
    marked[:-1] |= (WHOLE - percent_N[1:].astype(np.int64)) << PERCENT_AT
    return marked


def count_unwritten(flagged_N: np.ndarray) -> Counter[str]:
    """How many answers hold each field that the template does not write."""
    return Counter({field: int(((flagged_N & bit) != 0).sum()) for field, bit in UNWRITTEN.items()})


def percent_of(input_ids_NL: np.ndarray) -> np.ndarray | None:
    """How much each label of samples with flags weighs, [N, L] uint8; None where all weigh 100."""
    if input_ids_NL.dtype == np.int32:
        return None
    percent_NL = np.full(input_ids_NL.shape, WHOLE, np.uint8)
    percent_NL[:, 1:] -= (input_ids_NL[:, :-1] >> PERCENT_AT).astype(np.uint8)
    return percent_NL


def labelled(input_ids_NL: np.ndarray, labels_NL: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Samples without flags: (ids, labels), int32, with labels of -100 where MASKED."""
    is_masked_NL = ((input_ids_NL & MASKED) != 0) | (labels_NL == NOT_COUNTED)
    ids_NL = (input_ids_NL & ID_BITS).astype(np.int32, copy=False)
    return ids_NL, np.where(is_masked_NL, np.int32(NOT_COUNTED), ids_NL)
