"""Commands as a group that answers settings written as options, and says what is wrong with an option plainly."""

import contextlib
import re
from typing import Any, Final

import typer
import typer.core

from windlass.errors import UserError

OPTION: Final = re.compile(r"--([a-z][a-z_0-9-]*(?:\.[a-z_0-9]+)*)(?:=(.*))?", re.DOTALL)


PLAIN: Final = {
    r"Input should be less than or equal to (\S+)": r"it is at most \1",
    r"Input should be greater than or equal to (\S+)": r"it is at least \1",
    r"Input should be a valid integer.*": "it is a whole number",
    r"Input should be a valid number.*": "it is a number",
}
"""What pydantic says of an option's value -> what is printed."""


class Commands(typer.core.TyperGroup):
    """Answers settings that are written as options."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            found = (re.sub(pattern, plain, error.message) for pattern, plain in PLAIN.items())
            error.message = next((plain for plain in found if plain != error.message), error.message)
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, *more = args
        if ctx.resilient_parsing:  # the shell asks for completions
            return super().resolve_command(ctx, args)
        found: Any = super().resolve_command(ctx, args)
        if any(one.name == "overrides" for one in found[1].params):
            own = {option for one in found[1].params for option in (*one.opts, *one.secondary_opts)}
            room = f" {ctx.info_name}" if ctx.parent else ""
            words = more[: more.index("--")] if "--" in more else more
            _check_settings(f"windlass{room} {name}", own | {"--help"}, words)
        return found


def _check_settings(command: str, own: set[str], words: list[str]) -> None:
    """Raises UserError for an option that is a setting of a recipe, by our name or another tool's."""
    for word, following in zip(words, [*words[1:], "-"]):
        if (option := OPTION.fullmatch(word)) and word.partition("=")[0] not in own:
            is_alone = following.startswith("-") or following.endswith((".yaml", ".yml"))
            given = option[2] if option[2] is not None else "" if is_alone else following
            if setting := _setting(option[1], given if given or option[2] is not None else "VALUE"):
                rule = "a setting is written as KEY=VALUE after the recipe, without dashes"
                raise UserError(f"{command} {word}", rule, setting)


def _setting(name: str, value: str) -> str:
    """What to write instead of `--name value`; '' where that is no setting."""
    if "." in name:
        return f"write {name}={value}"
    from windlass.keys import sections  # with every config: needed for a mistake alone
    from windlass.other_names.renamed_keys import renamed_elsewhere, renamed_key_advice
    from windlass.recipe import parse_yaml

    key = name.replace("-", "_")
    ours = [
        f"{one.path}.{key}={value}" for one in sections() if not one.family for field in one.keys if field.name == key
    ]
    if len(ours) == 1:
        return f"write {ours[0]}"
    read: Any = value
    with contextlib.suppress(UserError, TypeError, LookupError):  # what is no YAML is a text
        read = parse_yaml(f"value: {value}", "the command line")["value"]
    return (renamed_key_advice("", key, read) or renamed_elsewhere(key, read)).removesuffix("; ")
