"""Which of `optim.groups` decides for which parameter, by name. No torch: names follow from the architecture alone, so a
pattern with a typing mistake is found before anything is prepared.

The first group that names a parameter decides for it alone; nothing is merged. Write the exception before the rule:

    groups: [{names: ["*norm*"]}, {names: ["model.layers.*"], frozen: true}]      all of the blocks but their norms

A tensor of two names (a tied embedding and head) follows whichever of them is named. Groups of different effect that name
both are refused, since no order of them could be meant.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final

from windlass.errors import UserError
from windlass.optim.config import GroupConfig

Rules = Mapping[str, GroupConfig]
"""Parameter name -> the group that decides for it; other parameters follow `optim` alone."""
NO_RULES: Final[Rules] = MappingProxyType({})


def assign(
    groups: Sequence[GroupConfig], names: Mapping[str, Sequence[str]], frozen: Collection[str] = ()
) -> dict[str, GroupConfig]:
    """`names`: parameter -> what a user may call it; `frozen`: the names of what an adapter freezes. Raises UserError for a group
    that matches nothing or changes nothing, for two settings of one tensor, and where nothing is left to train."""
    for index, group in enumerate(groups):
        for pattern in group.names:
            if not any(_matches(pattern, called) for called in names.values()):
                raise _unknown(index, pattern, [name for called in names.values() for name in called], frozen)
    chosen = {name: first for name, called in names.items() if (first := _first(groups, called)) is not None}
    for index in range(len(groups)):
        _check_effect(index, groups, [name for name in chosen if chosen[name] == index], names)
    rules = {name: groups[index] for name, index in chosen.items()}
    if names and all(name in rules and rules[name].frozen for name in names):
        raise UserError(
            f"optim.groups freezes all {len(names)} parameters",
            "a run trains something",
            "leave something out of the frozen names, or use `windlass evaluate`, which trains nothing",
        )
    return rules


def frozen_names(rules: Rules) -> frozenset[str]:
    return frozenset(name for name, group in rules.items() if group.frozen)


def _matches(pattern: str, called: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in called)


def _first(groups: Sequence[GroupConfig], called: Sequence[str]) -> int | None:
    """The first group that names the tensor. Raises UserError where its names lead to different settings."""
    firsts = {}
    for name in called:
        index = next((i for i, group in enumerate(groups) if any(fnmatchcase(name, p) for p in group.names)), None)
        if index is not None:
            firsts[name] = index
    if len({str(groups[index].effect) for index in firsts.values()}) > 1:
        ways = " and ".join(f"optim.groups[{index}] names {name}" for name, index in firsts.items())
        raise UserError(
            f"{ways}, with different settings",
            f"this model ties them: {' and '.join(called)} are one tensor, which can follow one group only",
            f"write both names in one group, before any pattern that matches either: names: [{', '.join(called)}]",
        )
    return min(firsts.values(), default=None)


def _check_effect(
    index: int, groups: Sequence[GroupConfig], own: Sequence[str], names: Mapping[str, Sequence[str]]
) -> None:
    group = groups[index]
    if not own:
        raise UserError(
            f"optim.groups[{index}] names {', '.join(group.names)}",
            "the first group that names a parameter decides, and groups before it name all of these",
            "move it before them, or remove it",
        )
    later = [pattern for after in groups[index + 1 :] for pattern in after.names]
    if not group.effect and not any(_matches(pattern, names[name]) for pattern in later for name in own):
        raise UserError(
            f"optim.groups[{index}] sets nothing for {', '.join(group.names)}",
            "such a group exempts its names from the groups after it, and none of those matches them",
            "set learning_rate_scale, weight_decay or frozen in it, or remove it",
        )


def _unknown(index: int, pattern: str, choices: Sequence[str], frozen: Collection[str]) -> UserError:
    if _matches(pattern, frozen):
        return UserError(
            f"optim.groups[{index}].names has {pattern!r}",
            "an adapter freezes the model's own parameters; groups name what is trained: its factors, and adapter.also_train",
            f'remove it; or train these parameters whole with adapter.also_train=["{pattern}"]',
        )
    near = difflib.get_close_matches(pattern, choices, n=3, cutoff=0.5) or [*choices[:3]]
    return UserError(
        f"optim.groups[{index}].names has {pattern!r}",
        f"a pattern matches at least one of the model's {len(choices)} parameter names, and this one matches none",
        f"the nearest names: {', '.join(near)}",
    )
