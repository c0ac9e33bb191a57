"""What a recipe may say about the shape of documents: where a conversation is in a row, with the shapes that are known; and a
middle that is moved behind the end. No torch."""

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field, field_validator

from windlass.settings import BrokenRule, Settings

Shape = Literal["messages", "sharegpt", "alpaca", "prompt-completion"]
CALLS = "tool_calls"
"""What `roles` gives to a message that is an answer of calls alone, written as JSON."""
SHARED_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "function_call": CALLS,
    "observation": "tool",
}


class RowsConfig(Settings):
    """Where a conversation is in a row of `format: chat`: in a list of messages (`messages`), or in columns (`prompt` and
    `completion`). With `format: preference` these hold only the prompt, and `chosen` and `rejected` the two answers. Dots in a
    key of the row name a nested one: meta.dialogue."""

    shape: Shape | None = None
    """A known shape, as in `rows: alpaca`; use this key to combine it with `slice`."""
    slice: str | None = None
    """The rows to take, first:end, as in `rows: "0:1000"`."""
    messages: str | None = None
    """Key of the list of messages."""
    role: str = "role"
    """With `messages`: key of a message's role."""
    content: str = "content"
    """With `messages`: key of a message's text."""
    roles: dict[str, str] = {}
    """With `messages`: role in the row -> role that the chat template knows, such as human: user. A row with any other role is
    bad. A message whose role becomes `tool_calls` is an answer that calls tools: its content is JSON of a call, or of a list."""
    prompt: str | list[str] | None = None
    """Key of the question, or several keys: the first must hold a text, the others may be empty, and a blank line joins
    them."""
    completion: str | None = None
    """Key of the answer."""
    system: str | None = None
    """Key of the text of the system message; no system message is written if it is empty or missing."""
    chosen: str | None = None
    """With `format: preference`: key of the preferred answer (a text, a message or messages); `chosen` if not given."""
    rejected: str | None = None
    """With `format: preference`: key of the other answer; `rejected` if not given."""

    def rules(self) -> Sequence[Iterator[BrokenRule]]:
        return (self._one_form(),)

    def _one_form(self) -> Iterator[BrokenRule]:
        given = {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}
        of_list = [name for name in given if name in ("messages", "role", "content", "roles")]
        of_columns = [name for name in given if name in ("prompt", "completion")]
        others = [name for name in given if name not in ("shape", "slice")]
        if self.shape is not None and others:
            beside = {name: given[name] for name in ("shape", *others)}
            change = f"remove .shape, or {', '.join(f'.{name}' for name in others)}"
            yield BrokenRule(beside, "a known shape gives all names", change)
        elif of_list and of_columns:
            first, second = of_list[0], of_columns[0]
            rule = f"`{first}` belongs to a list of messages, `{second}` to columns"
            yield BrokenRule({first: given[first], second: given[second]}, rule, f"remove .{first} or .{second}")
        elif of_list and self.messages is None:
            first = of_list[0]
            beside = {first: given[first], "messages": None}
            change = "give the key of the list as .messages"
            yield BrokenRule(beside, f"`{first}` describes the messages of a list", change)

    def errors_of_chat(self) -> Iterator[BrokenRule]:
        """Names by which no conversation can be read. Keys are those of the source."""
        answers = [name for name in ("chosen", "rejected") if getattr(self, name) is not None]
        columns = {name: getattr(self, name) for name in ("prompt", "completion")}
        has_columns = not self.model_fields_set.isdisjoint(columns)
        if answers:
            given = {f"rows.{answers[0]}": getattr(self, answers[0]), "format": "chat"}
            change = f"remove .rows.{answers[0]}, or set .format=preference"
            yield BrokenRule(given, "it is an answer of a pair (format=preference)", change)
        elif has_columns and not (self.prompts and self.completion):
            given = {f"rows.{name}": value for name, value in columns.items()}
            rule = "a conversation in columns has a prompt and a completion"
            yield BrokenRule(given, rule, "give both, .rows.prompt and .rows.completion")
        elif self.shape is None and self.messages is None and not has_columns:
            change = "give .rows.shape, .rows.messages, or .rows.prompt and .rows.completion"
            rule = "`rows` says where a conversation is, and these keys do not"
            yield BrokenRule({"rows": self, "format": "chat"}, rule, change)

    def errors_of_pairs(self) -> Iterator[BrokenRule]:
        """Names by which no pair can be read. Keys are those of the source."""
        if self.completion is not None:
            given = {"rows.completion": self.completion, "format": "preference"}
            rule = "it is an answer of a conversation (format=chat), and a pair has two"
            yield BrokenRule(given, rule, "give .rows.chosen and .rows.rejected in its place")
        elif not (self.model_fields_set - {"slice"}):
            change = "give .rows.prompt, .rows.messages, .rows.chosen or .rows.rejected"
            rule = "`rows` says where a pair is, and these keys do not"
            yield BrokenRule({"rows": self, "format": "preference"}, rule, change)

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt or []


SHAPES: dict[str, RowsConfig] = {
    "messages": RowsConfig(messages="messages"),
    "sharegpt": RowsConfig(messages="conversations", role="from", content="value", roles=SHARED_ROLES, system="system"),
    "alpaca": RowsConfig(prompt=["instruction", "input"], completion="output", system="system"),
    "prompt-completion": RowsConfig(prompt="prompt", completion="completion"),
}


class FillInMiddleConfig(Settings):
    """Fill in the middle, for code: the middle of some training documents is moved to their end, so that a model learns to
    write the text between two others. The text alone determines which documents these are, and where they are cut."""

    share: float = Field(0.5, gt=0, le=1)
    """The share of the documents whose middle is moved; the others stay unchanged."""
    suffix_first: float = Field(0.5, ge=0, le=1)
    """The share of the moved documents that begin with the suffix; the others begin with the prefix."""
    marks: list[str] | None = None
    """The tokens before prefix, suffix and middle, in this order; if not given, those of Qwen, StarCoder, SantaCoder
    or DeepSeek that the tokenizer has."""

    @field_validator("marks")
    @classmethod
    def _three(cls, marks: list[str] | None) -> list[str] | None:
        if marks is not None and (len(marks) != 3 or len(set(marks)) != 3):
            rule = "marks are three different tokens: those before prefix, suffix and middle"
            raise BrokenRule({"marks": marks}, rule, "give three as .marks, or remove .marks")
        return marks
