"""Mixtral's experts, and what it refuses."""

import pytest

from tests.model.families.test_family_table import architecture, refusal
from windlass.model.names import stored_tensor


def test_the_probabilities_of_the_chosen_are_normed_and_every_layer_is_sparse():
    arch = architecture("mixtral", num_experts=6)  # as transformers calls it too
    assert (arch.num_experts, arch.experts_per_token, arch.expert_size) == (6, 2, 76)
    assert arch.normed_weights and arch.sparse_layers == tuple(range(8))


def test_a_factor_of_a_loss_that_is_not_trained_on_is_refused():
    assert "without output_router_logits" in refusal("mixtral", router_aux_loss_coef=0.1)


def test_files_call_the_experts_otherwise():
    arch = architecture("mixtral")
    stored = {
        own: stored_tensor(f"model.layers.3.mlp.experts.{own}.weight", arch)
        for own in ("gate_proj", "up_proj", "down_proj")
    }
    experts = "model.layers.3.block_sparse_moe.experts"
    assert [place.names[7] for place in stored.values()] == [f"{experts}.7.{own}.weight" for own in ("w1", "w3", "w2")]


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ],
)
def test_what_would_be_another_model_is_refused(family, fields, named):
    assert named in refusal(family, **fields)
