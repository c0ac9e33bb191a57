"""What experts refuse of a layout: every message names what is given, the rule and what works."""

import pytest

from windlass.errors import UserError
from windlass.model.config import ModelConfig
from windlass.parallel.config import ParallelConfig
from windlass.parallel.rules.check_layout import check_layout
from windlass.parallel.rules.degrees import degree_errors
from windlass.parallel.rules.expert import model_expert_errors

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def sparse(**changes):
    return ModelConfig(family="qwen3_moe", **SIZES, **EXPERTS | changes).architecture(100)


def refusal(function, *args, **kwargs):
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    return caught.value


def check(architecture, *, optimizer="adamw", **parallel):
    for error in model_expert_errors(architecture, ParallelConfig(**parallel), optimizer):
        raise error


def test_experts_are_not_dealt_out_under_ddp():
    check_layout(ParallelConfig(zero=0))
    check_layout(ParallelConfig(expert=2, compile=True, recompute="selective"))
    error = refusal(check_layout, ParallelConfig(expert=2, zero=0))
    assert error.given == "parallel.zero=0 with parallel.expert=2" and "parallel.zero=1 or 2" in error.change


def test_expert_divides_the_ranks_that_share_parameters():
    check_layout(ParallelConfig(expert=2, shard=3, context=2), world=6)
    error = refusal(check_layout, ParallelConfig(expert=4, shard=3, context=2))
    assert error.given == "parallel.expert=4 with parallel.shard=3 and parallel.context=2"
    assert "shard x context = 6" in error.rule and error.change == "use parallel.expert=1 or 2 or 3 or 6"
    assert refusal(check_layout, ParallelConfig(expert=2), None, 3).given == "parallel.expert=2 with parallel.shard=3"


def test_experts_are_dealt_out_in_equal_numbers_and_only_where_there_are_any():
    check(sparse(), expert=3)
    assert refusal(check, sparse(), expert=4).change == "use parallel.expert=1 or 2 or 3 or 6"
    dense = ModelConfig(family="qwen3", intermediate_size=24, **SIZES).architecture(100)
    assert refusal(check, dense, expert=2).given == "parallel.expert=2 for a model of family qwen3 without experts"
    assert "remove parallel.expert" in refusal(check, sparse(mlp_only_layers=[0, 1]), expert=2).change
    check(dense, optimizer="muon", activation_gib=1.0)


@pytest.mark.parametrize(
    ("settings", "given", "change"),
    [
        ({"optimizer": "muon"}, "optim.kind=muon for a model with experts", "optim.kind=adamw"),
        ({"activation_gib": 2.0}, "parallel.activation_gib=2.0 for a model with experts", "parallel.recompute=none"),
    ],
)
def test_what_experts_refuse(settings, given, change):
    error = refusal(check, sparse(), **settings)
    assert given in error.given and change in error.change


def test_tensor_ranks_share_the_channels_of_each_expert():
    assert not list(degree_errors(4, sparse()))
    (error,) = degree_errors(4, sparse(moe_intermediate_size=26))
    assert "26 channels of each expert" in error.given and error.change == "use parallel.tp=1 or 2"
    assert "channels of the MLP" not in error.rule, "no layer has one"
    (mixed,) = degree_errors(4, sparse(mlp_only_layers=[0], intermediate_size=30))
    assert "30 channels of the MLP" in mixed.given and "24 channels of each expert" in mixed.rule
