"""What becomes of a conversation: its samples, and which of their ids are words that may be cut.

A conversation is one sample where every answer in it follows what inference would show the model. Where that is not so,
each answer is a sample of its own, rendered as inference would render it:

  * two answers in a row, for Qwen3, which writes a last answer otherwise
  * a system message that the template moves to the last question (Mistral v0.3)
  * a cue that opens a thought, where the template leaves thoughts out of what was said before (DeepSeek-R1 and its distils)
"""

from typing import NamedTuple

import numpy as np

from windlass.data.packing import WHOLE
from windlass.data.sources.chat_rows import ASSISTANT, is_learned, reasoning_apart
from windlass.data.tokenize.answer_spans import runs_of_true
from windlass.data.tokenize.chat_template import ChangedAnswer, Encoded, Messages, Template, Tools, without_weights
from windlass.errors import UserError

THOUGHT, THOUGHT_END = "<think>", "</think>"


class Rendered(NamedTuple):
    messages: Messages
    encoded: Encoded
    percent_N: np.ndarray | None
    """How much each id weighs; None where all weigh 100."""


def conversation_samples(template: Template, messages: Messages, where: str, tools: Tools = None) -> list[Rendered]:
    """The conversation as one sample; or, where an answer's context in it is not what inference would give, one sample of each
    answer that is learned, with the messages before it. Raises UserError as `encode` does."""
    learned = [number for number, message in enumerate(messages) if is_learned(message)]
    try:
        found = template.encode(messages, where, tools=tools)
        return [Rendered(messages, found, percent(found, [messages[number] for number in learned], where))]
    except ChangedAnswer:
        each = [messages[: number + 1] for number in learned]
        alone = [(upto, as_inference(template, upto, where, tools)) for upto in each]
        return [Rendered(upto, found, percent(found, upto[-1:], where)) for upto, found in alone]


def percent(found: Encoded, answers: Messages, where: str) -> np.ndarray | None:
    """How much each id weighs, [N] uint8; None where all answers weigh 1. `answers`: those that are learned. Raises UserError."""
    percents = np.array([round(100 * answer.get("weight", 1)) for answer in answers], np.uint8)
    if (percents == WHOLE).all():
        return None
    spans, end = runs_of_true(found.is_learned_N), len(found.ids_N)
    if spans[-1] == [
        end - 1,
        end,
    ]:  # the EOS of the document, which goes with the last answer: that has words, and is longer
        spans = spans[:-1]
    if len(spans) != len(answers) and (percents != percents[0]).any():
        raise UserError(
            f"{where} has {len(answers)} answers of several weights, and what is learned of it is in {len(spans)} pieces",
            "an answer has its weight where it is one piece, with something between it and the next",
            "give these answers one weight, or leave the row out",
        )
    begins = [begin for begin, _ in spans][: len(percents)]
    of_answer_N = np.searchsorted(begins, np.arange(len(found.ids_N)), "right") - 1
    return percents[of_answer_N.clip(0)]


def as_inference(template: Template, messages: Messages, where: str, tools: Tools = None) -> Encoded:
    """The last message learned behind all before it. Raises UserError."""
    last = len(messages) - 1
    try:
        return template.encode(messages, where, last, tools)
    except ChangedAnswer as error:
        bare = without_weights(messages)
        cued = template.render(bare[:-1], where, True, tools) if last else ""
        said = bare[-1]
        answer = _behind_cue(
            cued, template.render(bare, where, tools=tools), bare[-2]["content"].strip() if last else ""
        )
        if answer is None:
            reasoning, said = reasoning_apart(said)
            answer = _behind_thought(cued, template.render([*bare[:-1], said], where, tools=tools), reasoning)
        if answer is None:
            raise error
        found = template.of_spans(cued + answer, [(len(cued), len(cued + answer))])
        return template.checked(cued + answer, found, bare[-1:], [said], [*bare[:-1], said], where, tools)


def _behind_cue(cued: str, written: str, words: str) -> str | None:
    """What is written behind the cue that follows `words`, the last ones before the answer; None where no such cue is written."""
    cue = cued[cued.rfind(words) :] if words in cued else ""
    _, found, answer = written.rpartition(cue) if words and cue else ("", "", "")
    return answer if found else None


def _behind_thought(cued: str, written: str, reasoning: str) -> str | None:
    """Where the cue opens a thought, and what is written has none: the reasoning, perhaps empty, the end of the thought, and what
    is written of the answer. Else None."""
    before = cued.rstrip()
    if not before.endswith(THOUGHT) or not written.startswith(before.removesuffix(THOUGHT)):
        return None
    begin = "" if cued.endswith("\n") else "\n"
    answer = written.removeprefix(before.removesuffix(THOUGHT)).lstrip("\n")
    return f"{begin}{reasoning}\n{THOUGHT_END}\n\n{answer}"


def message_words(
    template: Template, messages: Messages, ids_N: np.ndarray, where: str, tools: Tools = None
) -> np.ndarray:
    """Which of the ids that `encode` gave are words of messages that are no answers, [N] bool: the marks of turns are not.
    None is where the template writes such words otherwise than they were given.

    A mark in front of each message's words says where they begin: to look for the words could find them in a mark of turns.
    """
    bare, begins = without_weights(messages), dict[int, str]()
    for number, message in enumerate(bare):
        words = message["content"].strip()
        if message["role"] != ASSISTANT and words:
            begins[number] = mark = f"zq{number}qz"
            bare[number] = {**message, "content": message["content"].replace(words, mark + words, 1)}
    text, marked = (template.render(one, where, tools=tools) for one in (without_weights(messages), bare))
    spans, num_before = list[tuple[int, int]](), 0
    for number, mark in begins.items():
        start, words = marked.find(mark) - num_before, messages[number]["content"].strip()
        spans.append((start, start + len(words)))
        marked, num_before = marked.replace(mark, "\0" * len(mark), 1), num_before + len(mark)
    is_words_N = np.zeros(len(ids_N), bool)
    found_ids, offsets = template.offsets(text)
    same = found_ids[: len(ids_N) - 1] == ids_N[:-1].tolist()
    if same and marked.replace("\0", "") == text:
        for at, (first, last) in enumerate(offsets[: len(ids_N) - 1]):
            is_words_N[at] = any(start <= first < last <= end for start, end in spans)
    return is_words_N
