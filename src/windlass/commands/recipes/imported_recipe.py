"""What `windlass import` makes of another tool's file: the recipe with its comments, as text. No torch."""

from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from windlass.recipe import apply_override

SECTIONS: Final = (
    "run", "model", "data", "objective", "adapter", "parallel", "precision", "optim", "checkpoint", "evaluate", "report",
)  # fmt: skip


@dataclass
class Imported:
    """`tree`: the recipe. `mapped`: their key and value -> what the recipe has for it; `assumed`: settings of the recipe, and
    what their tool does by which they are so; `left`: what the recipe has not, and why; `silent`: keys with nothing to set
    here."""

    tool: str
    tree: dict[str, Any] = field(default_factory=dict)
    mapped: list[tuple[str, str]] = field(default_factory=list)
    assumed: list[tuple[str, str]] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)

    def put(self, given: str, *overrides: str) -> None:
        is_eight = self.tree.get("precision", {}).get("policy") == "fp8"
        if is_eight and overrides in (("precision.policy=bf16",), ("precision.policy=fp16",)):
            self.silent.append(f"{given} (policy fp8 computes in bf16 what is not in fp8)")
            return
        for override in overrides:
            apply_override(self.tree, override)
        self.mapped.append((given, " ".join(overrides)))

    def assume(self, why: str, *overrides: str) -> None:
        """Settings by what the tool does, whether or not the file says it: the reason is a comment of the recipe."""
        self.put(why, *overrides)
        self.assumed.append((" ".join(overrides), why))

    def text(self, name: str) -> str:
        """The recipe as YAML, with what was left out as comments at its end."""
        sections = {section: self.tree[section] for section in SECTIONS if section in self.tree}
        body = yaml.safe_dump(sections, sort_keys=False, width=120, default_flow_style=None)
        head = f"# From {name}, a file of {self.tool}'s. Look at data.sources, and at the lines at the end.\n"
        assumed = _comments(f"By what {self.tool} does", self.assumed)
        text = head + body + assumed + _comments("Not in this recipe", self.left)
        return text + (f"# Nothing to set here for: {', '.join(self.silent)}\n" if self.silent else "")


def _comments(title: str, listed: list[tuple[str, str]]) -> str:
    return f"# {title}:\n" + "".join(f"# {what}: {why}\n" for what, why in listed) if listed else ""
