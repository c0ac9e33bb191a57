"""Errors in three sentences, their exit codes, and a suggestion only where a word is near."""

import pickle
import re
from pathlib import Path

import pytest

from windlass import errors
from windlass.errors import (
    AbsentSource,
    BadCheckpoint,
    BadLayout,
    BadShard,
    Diverged,
    OutOfSync,
    SeveralErrors,
    Stopped,
    Unavailable,
    UnreachableSource,
    UserError,
    WindlassError,
    exit_code_of,
    nearest,
    nearest_entry,
)
from windlass.launch import kubernetes, restarts, slurm

# kind: (exit code, whether the same command may succeed when started again)
TABLE = {
    WindlassError: (1, True),  # a bug may be a crash of one host
    BadLayout: (1, True),
    UserError: (2, False),
    AbsentSource: (2, False),
    BadShard: (2, False),
    BadCheckpoint: (2, False),
    SeveralErrors: (2, False),
    Diverged: (4, False),
    OutOfSync: (5, True),
    Stopped: (75, True),
    Unavailable: (74, True),
    UnreachableSource: (74, True),
}


def test_the_message_says_what_was_given_the_rule_and_the_change():
    error = UserError("run.steps=0", "a run has at least one step", "use run.steps=1 or more")
    assert str(error) == "run.steps=0\n  rule:   a run has at least one step\n  change: use run.steps=1 or more"


def test_every_kind_of_error_has_its_code_and_says_whether_to_retry():
    ours = {one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, Exception)}
    assert {kind: (kind.code, kind.__new__(kind).retry) for kind in ours} == TABLE


def test_whatever_starts_ranks_again_goes_by_one_table():
    assert {code: (ending.retry, ending.restart) for code, ending in errors.EXITS.items()} == {
        0: (False, False), 1: (True, True), 2: (False, False), 3: (False, False), 4: (False, False), 5: (True, True),
        74: (True, True), 75: (True, False), 130: (True, False),
    }  # fmt: skip
    assert errors.FINAL == (2, 3, 4) and slurm.NOT_REQUEUED == (2, 3, 4, 126, 127)
    assert kubernetes.FINAL is errors.FINAL, "what pods are not started again after"
    assert restarts.NOT_RESTARTED is errors.NOT_RESTARTED and errors.NOT_RESTARTED == (0, 2, 3, 4, 75, 130)


def test_the_exit_codes_are_those_of_the_contract():
    named = {name: code for name, code in vars(errors).items() if name.startswith("EXIT_")}
    assert named == {
        "EXIT_BUG": 1,
        "EXIT_USER_ERROR": 2,
        "EXIT_NOT_EQUAL": 3,
        "EXIT_DIVERGED": 4,
        "EXIT_OUT_OF_SYNC": 5,
        "EXIT_UNAVAILABLE": 74,
        "EXIT_STOPPED": 75,
        "EXIT_SIGNAL": 128,
        "EXIT_INTERRUPTED": 130,
    }
    assert {0, *named.values()} - {errors.EXIT_SIGNAL} == set(errors.EXITS)
    table = (Path(__file__).parents[2] / "docs" / "design.md").read_text().split("| exit code | meaning |")[1]
    listed = re.findall(r"^\| (\d+) \|", table.split("\n\n")[0], re.M)
    assert list(map(int, listed)) == list(errors.EXITS)


def test_the_tree_lists_every_error():
    """Of the source as text, so that a room's own errors count too."""
    bases = {}
    for path in Path(errors.__file__).parent.rglob("*.py"):
        bases |= dict(re.findall(r"^class (\w+)\((\w+)\):", path.read_text(), re.M))
    ours = {"WindlassError"}
    while more := {name for name, base in bases.items() if base in ours} - ours:
        ours |= more
    listed = re.findall(r"^ +([A-Z]\w+) +(?=[\da-z])", errors.__doc__.partition("`EXITS`")[0], re.M)
    assert sorted(listed) == sorted(ours) and len(ours) > 12


def test_what_is_a_users_mistake_is_a_user_error_and_nothing_else_is():
    assert {kind for kind in TABLE if issubclass(kind, UserError)} == {kind for kind in TABLE if kind.code in (2, 74)}


def test_any_error_has_an_exit_code():
    ends = (
        KeyboardInterrupt(),
        SystemExit(7),
        SystemExit(None),
        SystemExit("words"),
        ValueError(),
        Diverged("", "", ""),
    )
    assert [exit_code_of(error) for error in ends] == [130, 7, 0, 1, 1, 4]


def test_several_errors_cross_a_process_border_whole():
    both = SeveralErrors([UserError("a", "b", "c"), BadShard("d", "e", "f")])
    error = pickle.loads(pickle.dumps(both))
    assert [type(one) for one in error.errors] == [UserError, BadShard] and str(error) == str(both)
    assert (error.given, error.rule, error.change) == ("a; d", "b; e", "c; f")


@pytest.mark.parametrize("kind", [kind for kind in TABLE if kind is not SeveralErrors])
def test_an_error_crosses_a_process_border_whole(kind):
    """Ranks send their errors to each other by pickle."""
    error = pickle.loads(pickle.dumps(kind("given", "rule", "change")))
    assert type(error) is kind and (error.given, error.rule, error.change) == ("given", "rule", "change")


def test_nearest_names_the_closest_choice_or_nothing():
    assert nearest("lerning_rate", ["learning_rate", "warmup_steps"]) == "did you mean `learning_rate`? "
    assert nearest("zzz", ["learning_rate", "warmup_steps"]) == ""
    assert nearest("x", []) == ""


def test_what_is_beside_a_path_that_is_not_there_is_proposed(tmp_path):
    (tmp_path / "Qwen3-tiny").mkdir()
    assert nearest_entry(tmp_path / "Qwen3-tyny") == f"did you mean `{tmp_path}/Qwen3-tiny`? "
    assert nearest_entry(tmp_path / "other") == nearest_entry(tmp_path / "none" / "Qwen3-tiny") == ""
    assert nearest_entry(tmp_path / "Qwen3-tyny", []) == ""
    (tmp_path / "texts").mkdir()
    assert nearest_entry(tmp_path / "texts") == "", "it is there"
