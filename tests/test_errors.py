"""Errors in three sentences, their exit codes, and a suggestion only where a word is near."""

import pickle

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
    WindlassError: (1, False),
    BadLayout: (1, False),
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
    assert {kind: (kind.code, kind.retry) for kind in ours} == TABLE


def test_whatever_starts_ranks_again_goes_by_one_table():
    """Of the codes that an error of ours ends a process with; 1 is a crash, which may be one host's."""
    assert {kind.code for kind in TABLE if not kind.retry} - {errors.EXIT_BUG} <= set(errors.FINAL)
    assert set(errors.FINAL).isdisjoint({kind.code for kind in TABLE if kind.retry} | {errors.EXIT_BUG})
    assert set(errors.FINAL) <= set(restarts.NEVER) & set(slurm.NOT_REQUEUED)
    assert kubernetes.FINAL is errors.FINAL, "what pods are not started again after"


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
    listed = errors.__doc__.split("    code  meaning")[1]
    assert [line.split()[0] for line in listed.splitlines() if line[4:5].isdigit()] == (
        ["0", "1", "2", "3", "4", "5", "74", "75", "130", "128+n"]
    )


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
