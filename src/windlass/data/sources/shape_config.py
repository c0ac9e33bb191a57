"""What a recipe may say about the shape of documents: where a conversation is in a row, with the shapes that are known; and a
middle that is moved behind the end. No torch."""

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field, field_validator

from windlass.settings import Settings, Violation

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

    def rules(self) -> Sequence[Iterator[Violation]]:
        return (self._one_form(),)

    def _one_form(self) -> Iterator[ValueError]:
        of_list = [name for name in ("messages", "role", "content", "roles") if name in self.model_fields_set]
        of_columns = [name for name in ("prompt", "completion") if name in self.model_fields_set]
        if self.shape is not None and self.model_fields_set - {"shape", "slice"}:
            others = ", ".join(sorted(self.model_fields_set - {"shape", "slice"}))
            yield ValueError(f"`shape: {self.shape}` gives all names, and {others} are given too: leave one out")
        elif of_list and of_columns:
            yield ValueError(
                f"`{of_list[0]}` belongs to a list of messages, `{of_columns[0]}` to columns: leave one out"
            )
        elif of_list and self.messages is None:
            yield ValueError(f"`{of_list[0]}` needs `messages` beside it")

    def errors_of_chat(self) -> Iterator[ValueError]:
        """Names by which no conversation can be read."""
        answers = [name for name in ("chosen", "rejected") if getattr(self, name) is not None]
        columns = [name for name in ("prompt", "completion") if name in self.model_fields_set]
        if answers:
            yield ValueError(
                f"`{answers[0]}` of `rows` is an answer of `format: preference`: leave it out, or set that"
            )
        elif columns and not (self.prompts and self.completion):
            yield ValueError(f"`{columns[0]}` needs `prompt` and `completion` beside it")
        elif self.shape is None and self.messages is None and not columns:
            yield ValueError(
                "`rows` does not say where a conversation is: give `shape`, `messages`, or `prompt` and `completion`"
            )

    def errors_of_pairs(self) -> Iterator[ValueError]:
        """Names by which no pair can be read."""
        if self.completion is not None:
            yield ValueError(
                "`completion` of `rows` is an answer of `format: chat`; a pair has `chosen` and `rejected`: name those"
            )
        elif not (self.model_fields_set - {"slice"}):
            yield ValueError("`rows` does not say where a pair is: give `prompt`, `messages`, `chosen` or `rejected`")

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
            raise ValueError(f"`marks: {marks}` are not three different tokens: those before prefix, suffix and middle")
        return marks
