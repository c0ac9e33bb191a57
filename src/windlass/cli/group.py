"""The commands as a group that answers commands of a later version, and settings written as options."""

import re
from typing import Any, Final

import typer.core

from windlass.errors import UserError

NOT_YET: Final = {
    "plan": "`windlass train RECIPE --smoke` rehearses it at full size, and the first lines of a run count its memory",
    "drill": "`windlass doctor RECIPE` looks at this machine, and `windlass verify RECIPE` proves the layout",
}
"""Commands that are not in this version -> what to use instead."""
SETTING: Final = re.compile(r"--([a-z]+(?:\.[a-z_0-9]+)+)(?:=(.*))?", re.DOTALL)


class Commands(typer.core.TyperGroup):
    """Answers commands of a later version, and settings that are written as options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, *more = args
        if ctx.resilient_parsing:  # the shell asks for completions
            return super().resolve_command(ctx, args)
        if name in NOT_YET:
            raise UserError(f"windlass {name}", f"{name} is not in this version", NOT_YET[name])
        found: Any = super().resolve_command(ctx, args)
        if any(one.name == "overrides" for one in found[1].params):
            self._check_settings(name, more[: more.index("--")] if "--" in more else more)
        return found

    def _check_settings(self, command: str, words: list[str]) -> None:
        for word, following in zip(words, [*words[1:], "-"]):
            if setting := SETTING.fullmatch(word):
                value = setting[2] if setting[2] is not None else "VALUE" if following.startswith("-") else following
                rule = "a setting is written as KEY=VALUE after the recipe, without dashes"
                raise UserError(f"windlass {command} {word}", rule, f"write {setting[1]}={value}")
