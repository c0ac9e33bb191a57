"""What a model is given to go on from: a text, or the messages of a conversation; and a file of either. No torch."""

import json
from pathlib import Path
from typing import Any

from windlass.data.sources.chat_rows import ASSISTANT, as_messages
from windlass.errors import UserError

Messages = list[dict[str, Any]]
Prompt = str | Messages


def read_prompts(file: Path, chat: bool) -> list[Prompt]:
    """One prompt per line of a UTF-8 file; blank lines are none. `chat`: a line may be the messages of a conversation as JSON, a
    list or the `messages` of an object. Raises UserError."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--prompts {file}: {error}",
            "prompts are the lines of a text file in UTF-8",
            "correct the path or the file",
        ) from None
    found = [_read_prompt(line, f"{file}, line {number}", chat) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UserError(f"--prompts {file} has no line with text", "each line is a prompt", "write one a line")
    return found


def _read_prompt(line: str, where: str, chat: bool) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line
    held = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(held, list) or not held or not all(isinstance(one, dict) and "role" in one for one in held):
        return line
    if not chat:
        raise UserError(f"{where} is a list of messages", "messages are written by the chat template", "add --chat")
    messages = as_messages(held, where, "messages", "", "a line is a question, or a list of {role, content}")
    if messages[-1]["role"] == ASSISTANT:
        given = f"{where} ends with an answer"
        raise UserError(given, "the model answers the last message", "leave out the answer at the end")
    return messages


def shown_prompt(prompt: Prompt) -> str:
    """A prompt as text: of several messages, a line with its role for each."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def prompt_text(prompt: Prompt) -> str:
    """A prompt that no chat template writes. Raises UserError for a list of messages."""
    if isinstance(prompt, str):
        return prompt
    raise UserError("a list of messages as a prompt", "messages are written by the chat template", "set chat=True")
