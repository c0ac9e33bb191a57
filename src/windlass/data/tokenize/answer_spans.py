"""Where an answer begins and ends: in the text that a template writes, and among its ids."""

from collections.abc import Callable
from itertools import takewhile

import numpy as np


def common_begin(one: str, other: str) -> str:
    return "".join(letter for letter, _ in takewhile(lambda both: both[0] == both[1], zip(one, other)))


def end_of_all(words: list[str], text: str, start: int) -> int:
    """Behind the last of `words`, which follow each other from `start` on; -1 where one is missing, or there are none."""
    end = start if words else -1
    for one in words:
        at = text.find(one, end) if end >= 0 else -1
        end = at + len(one) if at >= 0 else -1
    return end


def behind_cue(cue: str, ids: list[int], span: slice, decode: Callable[[list[int]], str]) -> int:
    """Where a marked answer begins: behind what it has in common with the cue for one, which some templates mark with it."""
    at = span.start
    while at < span.stop and cue.startswith(decode(ids[span.start : at + 1])):
        at += 1
    return at


def up_to_turn_ends(ids: list[int], is_answer: list[bool], specials: set[int]) -> np.ndarray:
    """The mask without the ids after the last special token of each answer: the template wrote them, not the assistant."""
    is_learned_N = np.array(is_answer, bool)
    borders = np.flatnonzero(np.diff(np.concatenate([[0], is_learned_N, [0]])))
    for start, end in borders.reshape(-1, 2).tolist():
        ends = [at for at in range(start, end) if ids[at] in specials]
        if ends:
            is_learned_N[ends[-1] + 1 : end] = False
    return is_learned_N
