"""How a recipe is read: YAML with the numbers people write, and `section.key=value` overrides. What it may hold: config.py.

PyYAML speaks YAML 1.1, where `3e-4` is a string and the second of two equal keys wins without a word. Here the first is a
number (as in YAML 1.2) and the second an error.
"""

import re
from typing import Any

import yaml

from windlass.errors import UserError


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but `3e-4` is a number (YAML 1.2), and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key, _ in node.value:
            if key.value in seen:
                raise UserError(
                    f"the key `{key.value}` stands twice (line {key.start_mark.line + 1})",
                    "a key has one value",
                    "remove one of the two",
                )
            seen.append(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str, name: str) -> Any:
    """What `text` holds. `name`: what it is called in the UserError for what is not YAML."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UserError(
            f"{name} is not YAML: {' '.join(str(error).split())}", "see yaml.org", "mend the line"
        ) from None


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Sets `a.b=value` in the nested `tree`, in place; sections that are not there are made. Raises UserError."""
    path, equals, value = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise UserError(
            f"the override `{override}`", "overrides have the form section.key=value", "for example run.steps=100"
        )
    for key in keys[:-1]:
        if tree.get(key) is None:  # not there, or a section without keys
            tree[key] = {}
        tree = tree[key]
        if not isinstance(tree, dict):
            raise UserError(f"the override `{override}`", f"`{key}` holds a value, not a section", "shorten the path")
    tree[keys[-1]] = parse_yaml(value, f"the override `{override}`")
