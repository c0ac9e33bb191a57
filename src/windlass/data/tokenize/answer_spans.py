"""Where an answer begins and ends in the text that a template writes.

An answer begins behind the text of the messages before it with the template's cue for one (add_generation_prompt), which must be
a prefix of the whole text. It ends where the text of the messages up to it ends; or, where a template writes last answers
differently (Qwen3), at the special token behind its words and calls. Those words are looked for in its own turn alone: a template
that drops a thought writes them differently, and a later turn may hold them as they are. Where the turn holds them more than once
(gpt-oss writes "final" before the words of an answer), a mark is put behind them, and the template says where they are.

To render all messages before each answer would cost the square of their number. So that is done for the first answer and for one
more. For the others a window is rendered: the messages before the first question, then the turn. Its text must be, up to the
first question's words, the begin of the whole text, and from the question's words on, the whole text at that turn. Where it is
not, all messages before that answer are rendered.
"""

import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, NoReturn

import numpy as np

from windlass.data.sources.chat_rows import ASSISTANT, said_by
from windlass.errors import UserError

Span = tuple[int, int]
"""Start and end of an answer in the text, the end of its turn included."""
Render = Callable[[Sequence[dict[str, Any]], bool], str]
"""(messages, whether the cue for an answer follows) -> text."""
MARK = "zqqz"  # a text that a template leaves alone
BESIDE_CALLS = (
    "some chat templates write a call or the words beside it, or know no calls at all: leave one of the two out, or take the "
    "tokenizer of a model that writes both"
)
UNTOUCHED = (
    "fix the chat template of the tokenizer: what it writes before an answer ends in a line break or a special token, so that "
    "no token holds a part of both; or take another"
)
TRIES = 4  # offsets of a question's words that are looked at
ALL_EXACT = 2  # wanted answers, up to which windows would cost more than they save


class AnswerFinder:
    """Finds the answers of one conversation."""

    def __init__(
        self,
        text: str,
        messages: Sequence[dict[str, Any]],
        render: Render,
        specials: re.Pattern[str],
        opening: Callable[[], str],
        fail: Callable[[int], NoReturn],
    ):
        """`text`: of all messages; `opening`: what is written before a first message that is an answer; `fail`: raises the error
        for a message that cannot be found."""
        self._text, self._messages, self._render, self._specials = text, messages, render, specials
        self._opening, self._fail = opening, fail
        users = [number for number, message in enumerate(messages) if message["role"] == "user"]
        self._first_user = users[0] if users else len(messages)
        self._question = -1  # where the words of the first question are
        self._words_at = (-1, -1)  # a question's number, and where its words are
        self._ending = ""  # what follows the words of an answer

    def spans(self, wanted: Sequence[bool]) -> list[Span]:
        """The spans of the wanted messages."""
        numbers = [number for number, is_one in enumerate(wanted) if is_one]
        if len(numbers) <= ALL_EXACT:
            return [self._exact(number) for number in numbers]
        found: dict[int, Span | None] = {}
        end: int | None = None
        for number, message in enumerate(self._messages[: numbers[-1] + 1]):
            if message["role"] == ASSISTANT:
                span = None if end is None else self._near(number, end)
                if span is None and (wanted[number] or not found):
                    span = self._exact(number)
                if span is not None and self._question < 0:
                    self._find_question(number, span[0], end or 0)
                found[number] = span
                end = None if span is None else span[1]
        chosen = numbers[len(self._text) % len(numbers)]  # any: over many conversations, all
        span = found[chosen]
        if chosen != min(found) and (span is None or span[0] != len(self._before(chosen))):
            return [self._exact(number) for number in numbers]
        return [one for number in numbers if (one := found[number]) is not None]

    def _exact(self, number: int) -> Span:
        message, text, before = self._messages[number], self._text, self._before(number)
        upto = self._messages[: number + 1]
        is_last = len(upto) == len(self._messages)
        written = text if is_last else self._render(upto, False)
        ending = "" if is_last else self._ending_in(upto, written, len(before))
        if text.startswith(written) and len(written) > len(before):
            end = len(written)
        else:
            offsets = self._offsets_behind(message, len(before), ending)
            behind = offsets[0] if len(offsets) == 1 else self._behind_mark(number) if offsets else -1
            if behind < 0:
                self._fail(number)
            end = self._end_of_turn(behind)
            ending = text[behind:end]
        if ending and not message.get("tool_calls"):
            self._ending = ending
        return len(before), end

    def _ending_in(self, some: Sequence[dict[str, Any]], written: str, start: int) -> str:
        """What follows the words of the last of `some` messages in `written`, their text. Its turn begins at `start`."""
        words = [*said_by(some[-1])]
        behind = end_of_all(words, written, start)
        if len(words) == 1 and 0 <= behind < written.rfind(words[0]) + len(words[0]):  # "a" is in "<|channel|>final"
            marked = [*some[:-1], with_mark(some[-1])]
            behind = _offset_of_mark(self._render(marked, False), written)
        return "" if behind < 0 else written[behind:]

    def _offsets_behind(self, message: dict[str, Any], start: int, ending: str) -> list[int]:
        """Behind the words of `message` in its own turn, which begins at `start`: every offset where they are. `ending`: what
        follows them, up to the special token that no words hold."""
        marks = [mark.group() for mark in self._specials.finditer(ending)]
        limit = self._text.find(marks[-1], start) if marks else -1
        words, offsets = [*said_by(message)], list[int]()
        at = end_of_all(words, self._text, start, limit) if limit >= 0 else -1
        while at >= 0:
            offsets.append(at)
            at = end_of_all(words, self._text, at - len(words[0]) + 1, limit) if len(words) == 1 else -1
        return offsets

    def _behind_mark(self, number: int) -> int:
        """Behind the words of a message, where its turn holds them more than once; -1 where the template changes more."""
        marked = [*self._messages]
        marked[number] = with_mark(marked[number])
        return _offset_of_mark(self._render(marked, False), self._text)

    def _before(self, number: int) -> str:
        """The begin of the text, up to the answer."""
        before = self._render(self._messages[:number], True) if number else self._opening()
        if not self._text.startswith(before):
            self._fail(number)
        return before

    def _end_of_turn(self, behind: int) -> int:
        found = self._specials.search(self._text, behind)
        return behind if found is None else found.end()

    def _find_question(self, number: int, start: int, end_before: int) -> None:
        """Once the first answer behind the first question is found, which starts at `start`."""
        if number <= self._first_user or not self._messages[self._first_user]["content"].strip():
            return
        question = self._messages[self._first_user]
        words = question["content"].strip()
        self._question = self._text.find(words, end_before, start)
        if self._text.find(words, self._question + 1, start) >= 0:  # also in the marks of turns, or in other words
            marked = [*self._messages[:number]]
            marked[self._first_user] = {**question, "content": question["content"].replace(words, MARK + words, 1)}
            self._question = self._render(marked, False).find(MARK)
        self._words_at = self._first_user, self._question

    def _near(self, number: int, end_before: int) -> Span | None:
        """By a window; None where its text is not what the whole text holds. `end_before`: of the answer before."""
        first = number - 1
        while first > self._first_user and self._messages[first]["role"] != "user":
            first -= 1
        while first > self._first_user and self._messages[first - 1]["role"] == "user":
            first -= 1
        if self._question < 0:
            return None
        words = self._messages[first]["content"].strip()
        if self._words_at[0] != first:
            self._words_at = first, self._text.find(words, end_before) if words else -1
        window = [*self._messages[: self._first_user], *self._messages[first:number]]
        written = self._render(window, True)
        start = self._end_of_window(written)
        for _ in range(TRIES):  # a short question may be in the marks of turns before it
            if start is None and self._words_at[1] >= 0:
                self._words_at = first, self._text.find(words, self._words_at[1] + 1)
                start = self._end_of_window(written)
        if start is None:
            return None
        end = self._end_near(number, start, window, len(written))
        return None if end is None else (start, end)

    def _end_near(self, number: int, start: int, window: list[dict[str, Any]], cut: int) -> int | None:
        """`cut`: where the answer begins in the text of the window."""
        message = self._messages[number]
        if number == len(self._messages) - 1:
            return len(self._text) if end_of_all([*said_by(message)], self._text, start) >= 0 else None
        has_calls = bool(message.get("tool_calls"))
        if not has_calls and self._ending:
            offsets = self._offsets_behind(message, start, self._ending)
            followed = [offset for offset in offsets if self._text.startswith(self._ending, offset)]
            if followed:
                return followed[0] + len(self._ending)
        some = [*window, message]
        written = self._render(some, False)
        offsets = self._offsets_behind(message, start, self._ending_in(some, written, cut))
        if len(offsets) != 1:
            return None
        end = self._end_of_window(written)
        if end is None or end <= start:
            end = self._end_of_turn(offsets[0])
        if not has_calls:
            self._ending = self._text[offsets[0] : end]
        return end

    def _end_of_window(self, written: str) -> int | None:
        """Where in the whole text that of a window ends."""
        same, offset = self._question, self._words_at[1]
        if offset < 0 or written[:same] != self._text[:same] or not self._text.startswith(written[same:], offset):
            return None
        return offset + len(written) - same


def with_mark(message: dict[str, Any]) -> dict[str, Any]:
    """With MARK behind its words."""
    words = message["content"].rstrip()
    return {**message, "content": words + MARK + message["content"][len(words) :]}


def _offset_of_mark(marked: str, text: str) -> int:
    """Where MARK is in `marked`, which is `text` but for it; else -1."""
    offset = marked.find(MARK)
    return offset if offset >= 0 and marked[:offset] + marked[offset + len(MARK) :] == text else -1


def common_begin(one: str, other: str) -> str:
    return "".join(letter for letter, _ in takewhile(lambda both: both[0] == both[1], zip(one, other)))


def end_of_all(words: list[str], text: str, start: int, limit: int | None = None) -> int:
    """Behind the last of `words`, which follow each other from `start` on, up to `limit`; -1 where one is missing, or there are
    none."""
    end = start if words else -1
    for one in words:
        at = text.find(one, end, limit) if end >= 0 else -1
        end = at + len(one) if at >= 0 else -1
    return end


def behind_cue(cue: str, ids: list[int], span: slice, decode: Callable[[list[int]], str]) -> int:
    """Where a marked answer begins: behind what it has in common with the cue for one, which some templates mark with it."""
    at = span.start
    while at < span.stop and cue.startswith(decode(ids[span.start : at + 1])):
        at += 1
    return at


def runs_of_true(is_inside_N: np.ndarray) -> list[list[int]]:
    """Start and end of each run of True."""
    found: list[list[int]] = np.flatnonzero(np.diff(is_inside_N, prepend=False, append=False)).reshape(-1, 2).tolist()
    return found


def up_to_turn_ends(is_answer_N: np.ndarray, is_special_N: np.ndarray) -> np.ndarray:
    """The mask without the ids after the last special token of each answer: the template wrote them, not the assistant."""
    is_learned_N = is_answer_N.copy()
    for start, end in runs_of_true(is_answer_N):
        ends = np.flatnonzero(is_special_N[start:end])
        if len(ends):
            is_learned_N[start + ends[-1] + 1 : end] = False
    return is_learned_N


def check_answers(said: str, answers: Sequence[dict[str, Any]], where: str) -> None:
    """Raises UserError where the words of an answer are not in `said`, what is learned of all of them."""
    end = 0
    for message in answers:
        begin, calls = end, [*said_by({**message, "content": ""})]
        # a template may write calls before the words beside them
        for texts in (said_by({**message, "tool_calls": None}), calls):
            at = begin
            for words in texts:
                found = said.find(words, at)
                if found < 0:
                    raise UserError(
                        f"{where}: the answer {words[:60]!r} is not in what would be learned: {said[at : at + 60]!r}",
                        "template and tokenizer must not change an answer",
                        BESIDE_CALLS if calls else UNTOUCHED,
                    )
                at = found + len(words)
            end = max(end, at)


def check_marks(written: str, marked: str, answers: Sequence[dict[str, Any]], where: str) -> None:
    """Raises UserError where MARK, behind the words of each of `answers`, did not come into `marked`. `written`: without it."""
    if marked.count(MARK) - written.count(MARK) < len(answers):
        words = answers[0]["content"].strip()[:60]
        given = f"{where}: the chat template leaves out what an answer says beside its calls, such as {words!r}"
        raise UserError(given, "all that an answer says is learned", BESIDE_CALLS)
