"""The door: what a recipe names is what is made, over what is trained."""

import pytest
import torch

from windlass.errors import UserError
from windlass.optim.adamw import AdamW
from windlass.optim.config import OptimConfig
from windlass.optim.muon import Muon
from windlass.optim.optimizer import make_optimizer
from windlass.parallel.records import Record


def record(name, *shape, trained=True):
    return Record(name, torch.nn.Parameter(torch.ones(shape), requires_grad=trained), torch.Size(shape))


def test_kind_chooses_and_all_that_is_trained_is_held_once():
    records = [
        record("model.embed_tokens.weight", 4, 3),
        record("model.layers.0.a.weight", 3, 3),
        record("model.layers.0.norm.weight", 3),
    ]
    records.append(record("model.layers.1.a.weight", 3, 3, trained=False))
    for kind, made in (("adamw", AdamW), ("muon", Muon)):
        optimizer = make_optimizer(records, OptimConfig(kind=kind))
        assert isinstance(optimizer, made)
        held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        assert sorted(held) == sorted(id(one.tensor) for one in records[:3])
        optimizer.set_learning_rate(0.25)
        assert {group["lr"] for group in optimizer.param_groups} == {0.25}
        assert not any("layers.1" in name for name in optimizer.state_tensors()), "what is frozen has no state"
    assert set(make_optimizer(records, OptimConfig(kind="muon")).state_tensors()) == {
        "model.layers.0.a.weight.momentum",
        *(
            f"{name}.{key}"
            for name in ("model.embed_tokens.weight", "model.layers.0.norm.weight")
            for key in ("exp_avg", "exp_avg_sq", "step")
        ),
    }


def test_muon_without_anything_for_adamw():
    optimizer = make_optimizer([record("model.layers.0.a.weight", 3, 3)], OptimConfig(kind="muon"))
    optimizer.set_learning_rate(0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.eye(3)
    optimizer.step(torch.tensor(0.5))
    assert list(optimizer.state_tensors()) == ["model.layers.0.a.weight.momentum"]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_rank_that_trains_nothing_steps_nothing(kind):
    """A pipeline's, all of whose parameters are frozen."""
    frozen = record("model.layers.0.a.weight", 3, 3, trained=False)
    optimizer = make_optimizer([frozen], OptimConfig(kind=kind))
    optimizer.set_learning_rate(0.1)
    optimizer.step(torch.tensor(0.5))
    assert (optimizer.param_groups, optimizer.state_tensors(), optimizer.lost_shares()) == ([], {}, {})
    assert torch.equal(frozen.tensor, torch.ones(3, 3))


def test_muons_settings_with_another_kind_are_refused():
    with pytest.raises(UserError) as caught:
        OptimConfig(muon={"steps": 3})
    assert caught.value.given == "optim.muon with optim.kind=adamw" and "no effect" in caught.value.rule
    assert OptimConfig(kind="muon", muon={"steps": 3}).muon.steps == 3
    OptimConfig(muon={"steps": 5})
