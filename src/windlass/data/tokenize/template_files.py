"""What a tokenizer's files say of its chat template: whether there is one, and whether it reads the clock."""

import json
import re
import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from windlass.data.tokenize.tokenizer import CONFIG_FILE, TEMPLATE_FILE, TOKENIZER_FILE
from windlass.errors import UserError

CLOCK_CALL: Final = re.compile(r"""strftime_now\s*\(\s*(["'])([^"'\\]*)\1\s*\)""")
OTHER_CLOCK: Final = re.compile(r"strftime_now(?!\s+is\s+(not\s+)?(un)?defined).{0,40}")
DRAW: Final = re.compile(r"""(\|\s*random\b|["']random["']|\blipsum\b).{0,40}""")

SIMPLE_TEMPLATE: Final = """\
{% for message in messages %}{{ message.role }}:
{{ message.content }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}assistant:
{% endif %}"""
"""For any tokenizer: it adds no token, and what it writes before an answer ends in a line break."""


def on_day(template: str, date: str | None) -> str:
    """The template with each call of the clock replaced by what the clock says on that day; None: calls stay. Raises UserError
    for any other use of the clock, such as another name for it, since transformers takes no clock of ours; and for a draw."""
    if date is not None:
        day = datetime.fromisoformat(date)
        template = CLOCK_CALL.sub(lambda call: json.dumps(day.strftime(call[2])), template)
    code = _code_of(template)
    clock, draw = OTHER_CLOCK.search(code) if date is not None else None, DRAW.search(code)
    if clock is not None:
        raise UserError(
            f"the chat template reads the clock by {clock[0]}",
            "the date of a preparation is fixed on its first day: the format is a text, as in strftime_now('%d %b %Y')",
            "fix the chat template of the tokenizer",
        )
    if draw is not None:
        raise UserError(
            f"the chat template draws at random by {draw[0]}",
            "a conversation is written in one way: prepared twice, it has the same ids",
            "fix the chat template of the tokenizer",
        )
    return template


def _code_of(template: str) -> str:
    """A template's expressions and statements, without text and comments; one that cannot be read, whole: rendering fails."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        found = list(Environment().lex(template))
    except TemplateSyntaxError:
        return template
    return "".join(value for _, kind, value in found if kind != "data" and not kind.startswith("comment"))


def no_template(where: str) -> UserError:
    """`where`: a directory, or a hub name. Its change holds a whole template: an installed wheel has no docs."""
    folder = Path(where)
    change = f"use the tokenizer of a chat model, or write these four lines into {folder / TEMPLATE_FILE}"
    if (
        folder.parent.parent.name == "checkpoints"
    ):  # of a run: its files are hashed, and it has learned no conversations
        change = (
            f"`windlass export {shlex.quote(str(folder.parents[2]))} base`, write these four lines into base/{TEMPLATE_FILE}, "
            "and finetune it: `windlass init --data CHATS --model base`"
        )
    elif not folder.is_dir():
        change = f"use the tokenizer of a chat model, or download {where} and write these four lines into {TEMPLATE_FILE} there"
    return UserError(
        f"the tokenizer in {where} has no chat template",
        f"conversations are written by the tokenizer's own template: {TEMPLATE_FILE}, or chat_template in {CONFIG_FILE}",
        f"{change}:\n{SIMPLE_TEMPLATE}",
    )


def named_templates(held: str | dict[str, str] | None, where: str) -> dict[str, str]:
    """What transformers reads, one text or several by name, as several; one of them is `default`. Raises UserError."""
    if not held:
        raise no_template(where)
    found = {"default": held} if isinstance(held, str) else dict(held)
    if "default" not in found:
        raise UserError(
            f"the tokenizer in {where} has the chat templates {', '.join(sorted(found))}",
            "of several, the one called `default` writes conversations, and `tool_use` those with tools",
            f"rename one in {CONFIG_FILE}, or write it into chat_template.jinja alone",
        )
    return found


def check_has_template(files: Sequence[Path], where: str) -> None:
    """Raises UserError where none of a tokenizer's files holds a chat template: before a corpus is read for nothing."""
    configs = [file for file in files if file.name == CONFIG_FILE]
    is_file = any(file.name == TEMPLATE_FILE for file in files)
    if not is_file and not any(b'"chat_template"' in file.read_bytes() for file in configs):
        raise no_template(where)


def special_tokens(files: Sequence[Path]) -> tuple[str, ...]:
    """The special tokens that a tokenizer's files name, before it is opened; none where its own code makes it."""
    found = [json.loads(file.read_bytes()) for file in files if file.name == TOKENIZER_FILE]
    return tuple(token["content"] for held in found for token in held.get("added_tokens") or [] if token["special"])


def reads_clock(files: Sequence[Path]) -> bool:
    """Whether a chat template in a tokenizer's files writes the date of the day it runs."""
    held = [file for file in files if file.name == CONFIG_FILE or file.suffix == ".jinja"]
    return any(b"strftime_now" in file.read_bytes() for file in held)
