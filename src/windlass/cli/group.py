"""The commands as a group, with words for what is often tried and is not there."""

import re
from typing import Any, Final

import typer.core

from windlass.errors import UserError

NOT_YET: Final = {
    "plan": "`windlass train RECIPE --smoke` rehearses it at full size, and the first lines of a run count its memory",
    "drill": "`windlass doctor RECIPE` looks at this machine, and `windlass verify RECIPE` proves the layout",
}
"""Commands that this version has not, and what there is."""
SETTING: Final = re.compile(r"--([a-z]+(?:\.[a-z_0-9]+)+)(?:=(.*))?", re.DOTALL)


class Commands(typer.core.TyperGroup):
    """With words for what is often tried."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        command, *more = args
        if command in NOT_YET:
            raise UserError(f"windlass {command}", f"{command} is not in this version", NOT_YET[command])
        for at, word in enumerate(more[: more.index("--")] if "--" in more else more):
            if setting := SETTING.fullmatch(word):
                value = setting[2] if setting[2] is not None else more[at + 1] if at + 1 < len(more) else "VALUE"
                rule = "a setting of the recipe is KEY=VALUE behind it, without dashes"
                raise UserError(f"windlass {command} {word}", rule, f"write {setting[1]}={value}")
        return super().resolve_command(ctx, args)
