"""Qwen3-MoE's fields: which layers are sparse, and what a recipe is answered."""

import pytest
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from windlass.errors import UserError
from windlass.model.config import ModelConfig, architecture_from_hf
from windlass.model.families.family_table import to_hf

SIZES = {"hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL = {**SIZES, "vocab_size": 30, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def architecture(**fields):
    return ModelConfig(family="qwen3_moe", **SIZES, **fields).architecture(211)


def refusal(**fields):
    with pytest.raises(UserError) as caught:
        architecture(**fields)
    return str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 5]}, {"decoder_sparse_step": 3, "mlp_only_layers": [2]}],
)
def test_sparse_layers_are_those_of_transformers(fields):
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SMALL, **fields))
    theirs = [i for i, layer in enumerate(model.model.layers) if type(layer.mlp).__name__ == "Qwen3MoeSparseMoeBlock"]
    arch = architecture_from_hf({"model_type": "qwen3_moe", **SMALL, **fields})
    assert list(arch.sparse_layers) == theirs
    assert architecture_from_hf(to_hf(arch)) == arch


def test_a_token_goes_to_different_experts():
    assert "num_experts_per_tok 9 and num_experts 4" in refusal(num_experts=4, num_experts_per_tok=9)


def test_a_router_loss_needs_routers_and_its_factor_needs_a_router_loss():
    assert "no sparse layer among 6" in refusal(output_router_logits=True, mlp_only_layers=list(range(6)))
    logged = refusal(router_aux_loss_coef=0.01)
    assert (
        "router_aux_loss_coef: 0.01 without output_router_logits" in logged
        and "model.output_router_logits=true" in logged
    )
    arch = architecture(router_aux_loss_coef=0.01, output_router_logits=True)
    assert arch.router_loss and arch.router_loss_scale == 0.01


def test_a_window_needs_its_switch_and_holds_in_every_layer():
    assert "without use_sliding_window" in refusal(sliding_window=7)
    arch = architecture(use_sliding_window=True, sliding_window=7)
    assert (arch.window, arch.window_layers) == (7, tuple(range(6)))


def test_what_hub_files_carry_besides_is_passed_over_and_refused_in_a_recipe():
    assert architecture_from_hf({"model_type": "qwen3_moe", **SMALL, "max_window_layers": 48}).num_experts == 3
    assert "max_window_layers" in refusal(max_window_layers=48)
    assert "shared_expert_intermediate_size" in refusal(shared_expert_intermediate_size=64)


@pytest.mark.parametrize(("width", "hidden", "stated"), [(8, 16, None), (12, 16, "eager"), (8, 36, "eager")])
def test_a_config_names_another_product_where_the_grouped_one_fails(width, hidden, stated):
    config = {"model_type": "qwen3_moe", **SMALL, "moe_intermediate_size": width, "hidden_size": hidden, "head_dim": 8}
    written = to_hf(arch := architecture_from_hf(config))
    assert written.get("experts_implementation") == stated and architecture_from_hf(written) == arch
    dense = architecture_from_hf({**config, "mlp_only_layers": list(range(6))})
    assert "experts_implementation" not in to_hf(dense)
    assert "grouped product where their widths allow" in refusal(experts_implementation="eager")
