"""A user's mistake: three sentences, their order, and a suggestion only where one is near."""

import pickle

import pytest

from windlass.errors import BadCheckpoint, BadLayout, BadShard, UserError, nearest


def test_the_message_says_what_was_given_the_rule_and_the_change():
    error = UserError("run.steps=0", "a run has at least one step", "use run.steps=1 or more")
    assert str(error) == "run.steps=0\n  rule:   a run has at least one step\n  change: use run.steps=1 or more"


@pytest.mark.parametrize("kind", [UserError, BadShard, BadCheckpoint, BadLayout])
def test_an_error_crosses_a_process_border_whole(kind):
    """Ranks send their errors to the launcher by pickle."""
    error = pickle.loads(pickle.dumps(kind("given", "rule", "change")))
    assert type(error) is kind and isinstance(error, UserError)
    assert (error.given, error.rule, error.change) == ("given", "rule", "change")


def test_nearest_names_the_closest_choice_or_nothing():
    assert nearest("lerning_rate", ["learning_rate", "warmup_steps"]) == "did you mean `learning_rate`? "
    assert nearest("zzz", ["learning_rate", "warmup_steps"]) == ""
    assert nearest("x", []) == ""
