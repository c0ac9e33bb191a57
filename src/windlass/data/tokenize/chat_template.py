"""Conversations -> token ids, and which of them are learned: the assistant's, found by the tokenizer's own chat template.

The template writes the messages of a row (sources/chat_rows) as one text with its turn marks. The assistant's part of that text
is found in one of two ways:

  * the template marks it itself (`{% generation %}`): transformers returns the mask, and the cue for an answer (see below) is
    taken out where the template marks it too (SmolLM3);
  * else by the text of the messages before an answer, which must be a prefix of the whole text (answer_spans). A template that
    fits neither is refused by name.

An answer is learned up to its last special token, the end of the turn, and not what the template writes after it. Turns after the
last answer are left out: they would teach nothing. A conversation may begin with an answer. Special tokens in any field of a
message are refused, since a template may write the field; so are messages that the template leaves out.

What an answer holds besides its words (reasoning, arguments of calls, a name) is written by some templates and left out by
others. It is looked for in what is learned of that answer, and reported where it is not there (`Encoded.unwritten`).
"""

from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np

from windlass.data.sources.chat_rows import (
    ASSISTANT,
    check_message,
    is_learned,
    tool_names,
    unwritten_fields,
)
from windlass.data.tokenize.answer_spans import (
    AnswerFinder,
    Span,
    behind_cue,
    check_answers,
    check_marks,
    common_begin,
    runs_of_true,
    up_to_turn_ends,
    with_mark,
)
from windlass.data.tokenize.template_files import named_templates, on_day
from windlass.data.tokenize.template_tokens import TextEncoder
from windlass.data.tokenize.tokenizer import NO_LIMIT, open_tokenizer
from windlass.errors import UserError

WRITTEN_AS_IS: Final = ("system", "user", ASSISTANT)
PROBE: Final = [
    {"role": "user", "content": "Which rope?"},
    {"role": ASSISTANT, "content": "The red one."},
    {"role": "user", "content": "And then?"},
    {"role": ASSISTANT, "content": "Pull it in slowly."},
]


Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
Found = tuple[np.ndarray, np.ndarray, list[str]]
"""(ids, whether each is of a wanted answer, what is written of each such answer)."""


class ChangedAnswer(UserError):
    """An answer whose context in the whole text is not what inference would give."""


class Encoded(NamedTuple):
    """A conversation as ids; the last one is EOS."""

    ids_N: np.ndarray
    """[N] int32."""
    is_learned_N: np.ndarray
    """[N] bool: which ids are targets."""
    unwritten: list[list[str]]
    """Per answer that is learned: its fields that are not in what is learned of it."""


class Template:
    """The chat template of a prepared tokenizer."""

    def __init__(self, tokenizer_directory: Path, date: str | None = None, is_fast: bool = False):
        """`date`: the day that a template sees as today, as YYYY-MM-DD (`reads_clock`); `is_fast`: tiktoken encodes. Raises
        UserError where there is none."""
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_directory)
        self._tokenizer.model_max_length = NO_LIMIT  # what is too long is refused or cut later; transformers would warn
        found = named_templates(self._tokenizer.chat_template, str(tokenizer_directory))
        self._templates = {name: on_day(text, date) for name, text in found.items()}
        self._tokenizer.chat_template = self._templates  # of which transformers takes `tool_use` where there are tools
        self._eos_id = open_tokenizer(tokenizer_directory)[1]
        self._decode = self._tokenizer.backend_tokenizer.decode
        self._tokenizer.backend_tokenizer.no_truncation()
        self._tokenizer.backend_tokenizer.no_padding()
        self.encoder = TextEncoder(tokenizer_directory, self._tokenizer.backend_tokenizer, is_fast)
        added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder()
        self._specials = {number: token.content for number, token in added.items() if token.special}
        self._special_texts = tuple(self._specials.values())
        self._is_special_V = np.zeros(max(self._tokenizer.get_vocab().values()) + 1, bool)
        self._is_special_V[[*self._specials]] = True
        self.num_rendered = self.chars_rendered = 0
        """Texts that were rendered, and their characters: what encoding costs."""

    def _marks_answers(self, tools: Tools) -> bool:
        text = self._templates.get("tool_use" if tools else "default", self._templates["default"])
        return "{% generation" in text or "{%- generation" in text

    def encode(self, messages: Messages, where: str, first: int = 0, tools: Tools = None) -> Encoded:
        """`where`: the conversation, for messages; `first`: the message from which on answers are learned.

        Raises UserError: no answer is learned, or everything is; the template changes answers, or cannot be followed.
        """
        self.check_words(messages, where)
        wanted = [number >= first and is_learned(message) for number, message in enumerate(messages)]
        bare = without_weights(messages)
        text = self.render(bare, where, tools=tools)
        follow = self._marked if self._marks_answers(tools) else self._followed
        answers = [message for message, is_wanted in zip(bare, wanted) if is_wanted]
        return self.checked(text, follow(text, bare, where, wanted, tools), answers, answers, bare, where, tools)

    def checked(
        self,
        text: str,
        found: Found,
        answers: Messages,
        written_as: Messages,
        messages: Messages,
        where: str,
        tools: Tools,
    ) -> Encoded:
        """What was found, once it is known to be learned as it was meant. `written_as`: the answers as they were given to the
        template. Raises UserError."""
        ids_N, is_answer_N, written = found
        is_learned_N = up_to_turn_ends(is_answer_N, self._is_special_V[ids_N])
        ids_N, is_learned_N = self._ended(ids_N, is_learned_N)
        if not is_learned_N[:-1].any() or is_learned_N.all():
            share = "nothing" if not is_learned_N[:-1].any() else "everything"
            rule = "answers are learned, and what they answer is not"
            raise UserError(f"{where}: {share} of it would be learned", rule, "fix the chat template, or leave it out")
        said = self._decode(ids_N[is_learned_N].tolist(), skip_special_tokens=True)
        check_answers(said, written_as, where)
        self._check_beside_calls(written_as, messages, where, tools)
        self._check_kept(text, messages, where, tools)
        return Encoded(ids_N, is_learned_N, [unwritten_fields(*pair) for pair in zip(answers, written)])

    def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids, begin and end of each in the text)."""
        found = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    def check_words(self, messages: list[dict[str, Any]], where: str) -> None:
        """Raises UserError where a message holds a special token."""
        for message in messages:
            check_message(message, where, self._special_texts)

    def _check_beside_calls(self, answers: Messages, messages: Messages, where: str, tools: Tools) -> None:
        """Raises UserError where the words beside an answer's calls are left out. Short ones may be in a call by chance."""
        both = [one for one in answers if one.get("tool_calls") and one["content"].strip()]
        if both:
            marked = [with_mark(one) if any(one is other for other in both) else one for one in messages]
            written, with_marks = (self.render(some, where, tools=tools) for some in (messages, marked))
            check_marks(written, with_marks, both, where)

    def _check_kept(self, text: str, messages: Messages, where: str, tools: Tools) -> None:
        """Some templates leave out the system's words, or those of roles that they do not know.

        The words of system and user are in the text unchanged. Those of others may be short, and be there by chance (a tool's
        "4"), or be written otherwise (as JSON, by Llama 3.1): of theirs, a mark at the end must come through the template.
        """
        others = [k for k, m in enumerate(messages) if m["role"] not in WRITTEN_AS_IS and m["content"].strip()]
        marks = {number: f"zq{number}qz" for number in others}
        marked = [{**m, "content": m["content"] + marks[k]} if k in marks else m for k, m in enumerate(messages)]
        written = self.render(marked, where, tools=tools).lower() if marks else ""
        lost = next((name for name in tool_names(tools or []) if name not in text), None)
        if lost is not None:
            given = f"{where}: the chat template leaves out the tool {lost!r}, which the row declares"
            rule = "an answer is learned behind all that was said before it"
            raise UserError(given, rule, "take the tokenizer of a model that knows tools, or leave `tools` out")
        for number, message in enumerate(messages):
            is_kept = marks[number] in written if number in marks else message["content"].strip() in text
            if message["role"] != ASSISTANT and not is_kept:
                raise UserError(
                    f"{where}: the chat template leaves out what the {message['role']} says: "
                    f"{message['content'].strip()[:60]!r}",
                    "an answer is learned behind all that was said before it",
                    "take the tokenizer of a model that knows that role, or leave the message out",
                )

    def _marked(self, _text: str, messages: Messages, where: str, wanted: list[bool], tools: Tools) -> Found:
        """By the template's own marks."""
        found = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, is_answer_N = list(found["input_ids"]), np.array(found["assistant_masks"], bool)
        ids_N = np.array(ids, np.int32)
        spans = [slice(start, end) for start, end in runs_of_true(is_answer_N)]
        is_wanted = [one for one, message in zip(wanted, messages) if message["role"] == ASSISTANT]
        if len(spans) != len(is_wanted):
            if not all(is_wanted):
                given = (
                    f"{where}: {len(spans)} answers are marked in what the template writes of {len(messages)} messages"
                )
                rule = "an answer that is not learned (of a pair's prompt, or of weight 0) is found by its marks"
                raise UserError(given, rule, "fix the chat template, or leave the row out")
            return ids_N, is_answer_N, [self._tokenizer.decode(ids)] * len(is_wanted)
        has_cue = any(ids[span.start] in self._specials for span in spans)  # it begins by one
        asked = [*takewhile(lambda message: message["role"] != ASSISTANT, messages)]
        cue = self._cue(asked or PROBE[:1], where) if has_cue else ""
        for span, is_one in zip(spans, is_wanted):
            is_answer_N[span] = is_one
            is_answer_N[span.start : behind_cue(cue, ids, span, self._tokenizer.decode)] = False
        written = [self._tokenizer.decode(ids[span]) for span, is_one in zip(spans, is_wanted) if is_one]
        return ids_N, is_answer_N, written

    def render(self, messages: Sequence[dict[str, Any]], where: str, cue: bool = False, tools: Tools = None) -> str:
        """The text of the template; `cue`: with its opening of an answer. Raises UserError."""
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=cue
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:  # a template's own code
            rule = "conversations are written by the tokenizer's own chat template"
            raise UserError(
                f"{where}: the chat template refuses it: {error}", rule, "leave it out, or fix it"
            ) from None
        self.num_rendered += 1
        self.chars_rendered += len(text)
        return text

    def _followed(self, text: str, messages: Messages, where: str, wanted: list[bool], tools: Tools) -> Found:
        """By the text of the messages before each answer."""
        finder = AnswerFinder(
            text,
            messages,
            lambda some, cue: self.render(some, where, cue, tools),
            self.encoder.finder,
            partial(self._opening, where),
            partial(self._fail, where),
        )
        return self.of_spans(text, finder.spans(wanted))

    def of_spans(self, text: str, spans: list[Span]) -> Found:
        """With each span of the text as an answer."""
        ids_N, starts_N, offsets = self.encoder.encode(text, [offset for span in spans for offset in span])
        is_answer_N = np.zeros(len(ids_N), bool)
        for first, last in np.searchsorted(starts_N, offsets).reshape(-1, 2).tolist():
            is_answer_N[first:last] = True
        return ids_N, is_answer_N, [text[start:end] for start, end in spans]

    def _fail(self, where: str, number: int) -> NoReturn:
        raise ChangedAnswer(
            f"{where}: message {number} cannot be found by the chat template of {self._tokenizer.name_or_path}",
            "the text of the messages before an answer, with the cue for one, is the begin of the whole text",
            "mark answers in the template with {% generation %} ... {% endgeneration %}",
        )

    def _opening(self, where: str) -> str:
        """What is written before an answer that no message precedes: the template's own words, if any, and the cue.

        Many templates look at the first message, and cannot write none; so the cue is looked for in a lone answer, as it is
        written behind a question. Where a template has no cue, an answer begins where it differs from a question.
        """
        lone, cue = self.render(PROBE[1:2], where), self._cue(PROBE[:1], where)
        return lone.rpartition(cue)[0] + cue if cue else common_begin(self.render(PROBE[:1], where), lone)

    def _cue(self, messages: list[dict[str, Any]], where: str) -> str:
        """What is written behind messages for an answer to begin."""
        asked, cued = (self.render(messages, where, cue=has_cue) for has_cue in (False, True))
        return cued[len(common_begin(asked, cued)) :].lstrip()  # without a cue, Phi-3 writes EOS in its place

    def _ended(self, ids_N: np.ndarray, is_learned_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """With one EOS at the end, which is learned: the template's own, without white space behind it, or one more."""
        own = np.flatnonzero(ids_N == self._eos_id)
        if len(own) and not self._decode(ids_N[own[-1] + 1 :].tolist(), skip_special_tokens=False).strip():
            ids_N, is_learned_N = ids_N[: own[-1] + 1], np.append(is_learned_N[: own[-1]], True)
            at = len(ids_N) - 1
            while len(own) == 1 and at and not self._tokenizer.decode([ids_N[at - 1]]).strip():
                at -= 1
            if at and ids_N[at - 1] in self._specials:  # Phi-3 ends documents by EOS, and a line before it
                is_learned_N[at:-1] = False
            return ids_N, is_learned_N
        return np.append(ids_N, np.int32(self._eos_id)), np.append(is_learned_N, True)


def without_weights(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: held for key, held in message.items() if key != "weight"} for message in messages]


def check_template(tokenizer_directory: Path) -> str | None:
    """What is wrong with the template on a conversation of four messages, in a sentence; None if nothing is."""
    try:
        Template(tokenizer_directory).encode(PROBE, "a conversation of four messages")
    except UserError as error:
        return error.given
    return None
