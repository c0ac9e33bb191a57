"""Parameter groups: who shares rate and decay, and who is left out."""

import pytest
import torch

from windlass.optim.config import GroupConfig, OptimConfig
from windlass.optim.groups import decay_of, parameter_groups, set_learning_rate, trainable
from windlass.optim.rules import NO_RULES
from windlass.parallel.records import Record


def record(name, shape, logical_shape=None, trained=True):
    return Record(
        name, torch.nn.Parameter(torch.ones(shape), requires_grad=trained), torch.Size(logical_shape or shape)
    )


def test_matrices_decay_by_their_logical_shape():
    records = [record("matrix", (6,), (3, 4)), record("bias", (6,)), record("other", (2, 2))]
    groups = parameter_groups(records, OptimConfig(weight_decay=0.3), NO_RULES)
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert [[id(p) for p in group["params"]] for group in groups] == [
        [id(records[0].tensor), id(records[2].tensor)],
        [id(records[1].tensor)],
    ]


def test_a_rules_decay_holds_for_whatever_it_names_and_its_rate_scales_the_schedules():
    records = [record("a", (2, 2)), record("b", (2,)), record("c", (2, 2)), record("d", (2,))]
    slow = GroupConfig(names=["a", "b"], learning_rate_scale=0.25, weight_decay=0.05)
    undecayed = GroupConfig(names=["c"], weight_decay=0.0)
    groups = parameter_groups(records, OptimConfig(weight_decay=0.3), {"a": slow, "b": slow, "c": undecayed})
    set_learning_rate(groups, 4.0)
    logged = [(len(group["params"]), group["lr"], group["weight_decay"]) for group in groups]
    assert logged == [(2, 1.0, 0.05), (2, 4.0, 0.0)], "c and d share what holds for them, and a group"


def test_a_rule_that_names_no_decay_leaves_it_as_it_is():
    slow = GroupConfig(names=["*"], learning_rate_scale=0.5)
    decays = [decay_of(r, OptimConfig(weight_decay=0.3), {"x": slow}) for r in (record("x", (2, 2)), record("x", (2,)))]
    assert decays == [0.3, 0.0]


def test_what_is_frozen_is_in_no_group():
    records = [record("a", (2, 2), trained=False), record("b", (2, 2))]
    assert trainable(records) == records[1:]
    (group,) = parameter_groups(records, OptimConfig(), NO_RULES)
    assert group["params"] == [records[1].tensor]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weight_decay": 0.1}, "optim.groups[1] has frozen=true with weight_decay=0.1"),
        ({"learning_rate_scale": 0.5, "weight_decay": 0.0}, "with learning_rate_scale=0.5 and weight_decay=0.0"),
    ],
)
def test_rate_and_decay_of_what_is_frozen_are_refused(settings, said):
    from windlass.errors import UserError

    with pytest.raises(UserError) as caught:
        OptimConfig(groups=[{"names": ["a"], "frozen": True}, {"names": ["b"], "frozen": True, **settings}])
    assert said in caught.value.given and "no effect" in caught.value.rule
