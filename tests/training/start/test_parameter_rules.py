"""`optim.groups` against a model's names: what is reported, and what is refused before anything is prepared."""

import pytest

from tests import tiny
from windlass.errors import UserError
from windlass.training.preflight import make_ready
from windlass.training.start.parameter_rules import MAX_KINDS, describe_trainable, rules_of


def announced(tmp_path, groups, **model):
    config = tiny.recipe(tmp_path, optim={"groups": groups}, model=model)
    architecture = config.model.architecture(300)
    return describe_trainable(config, architecture, rules_of(config, architecture))


def test_nothing_is_reported_where_all_is_trained_alike(tmp_path):
    assert announced(tmp_path, []) == {}


def test_a_frozen_embedding_is_reported_with_the_head_that_it_is(tmp_path):
    assert announced(tmp_path, [{"names": ["lm_head.weight", "model.layers.0.*norm*"], "frozen": True}]) == {
        "trainable": "8.92 k of 16.2 k parameters in 19 tensors",
        "frozen": "7.26 k of 16.2 k parameters in 5 tensors; model.embed_tokens.weight and lm_head.weight are one",
    }


def test_rates_and_decays_are_reported_by_group(tmp_path):
    groups = [{"names": ["*norm*"]}, {"names": ["model.layers.*"], "learning_rate_scale": 0.1, "weight_decay": 0}]
    lines = announced(tmp_path, groups)
    assert (
        lines["optim.groups[1]"] == "learning_rate_scale 0.1, weight_decay 0: 8.83 k of 16.2 k parameters in 14 tensors"
    )
    assert set(lines) == {"trainable", "optim.groups[1]"}


def test_gpt2s_fused_projection_is_one_tensor(tmp_path):
    gpt2 = {**dict.fromkeys(tiny.QWEN3_KEYS), "family": "gpt2", "n_embd": 24, "n_layer": 1, "n_head": 2}
    lines = announced(tmp_path, [{"names": ["transformer.h.0.attn.c_attn.weight"], "frozen": True}], **gpt2)
    assert lines["frozen"].endswith("in 1 tensor") and lines["frozen"].startswith("1.73 k of ")


def test_a_pattern_that_matches_nothing_leaves_no_trace(tmp_path):
    config = tiny.recipe(tmp_path, optim={"groups": [{"names": ["transformer.wte.weight"], "frozen": True}]})
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"optim.groups\[0\].names has 'transformer.wte.weight'"):
        make_ready(config, 1, "cpu")
    assert sorted(tmp_path.iterdir()) == before


def test_the_optimizers_tensors_are_counted_as_the_trainable_ones(tmp_path):
    gpt2 = {**dict.fromkeys(tiny.QWEN3_KEYS), "family": "gpt2", "n_embd": 24, "n_layer": 3, "n_head": 2}
    groups = [{"names": ["transformer.h.0.attn.c_attn.weight"], "frozen": True}]
    config = tiny.recipe(tmp_path, optim={"kind": "muon", "groups": groups}, model=gpt2)
    architecture = config.model.architecture(300)
    lines = describe_trainable(config, architecture, rules_of(config, architecture))
    assert lines["optimizer"].startswith("Muon for 11 hidden matrices of "), "four a block, one is frozen"
    assert lines["optimizer"].endswith("AdamW for 28 other tensors"), (
        "eight a block, the last norm's two, two embeddings"
    )
    assert lines["trainable"].endswith(f"in {11 + 28} tensors")


def test_muon_without_a_matrix_to_step_is_refused(tmp_path):
    frozen = [{"names": ["*_proj.weight"], "frozen": True}]
    config = tiny.recipe(tmp_path, optim={"kind": "muon", "groups": frozen})
    with pytest.raises(UserError, match=r"optim.kind=muon with every matrix of the blocks frozen"):
        make_ready(config, 1, "cpu")
    rules_of(tiny.recipe(tmp_path, optim={"groups": frozen}), config.model.architecture(300))


def test_more_kinds_of_blocks_than_graphs_are_refused_where_blocks_are_compiled(tmp_path):
    parts = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]
    groups = [{"names": [f"model.layers.{layer}.*.{part}.weight"], "frozen": True} for layer, part in enumerate(parts)]
    sections = {"model": {"num_hidden_layers": 5}, "optim": {"groups": groups}}
    config = tiny.recipe(tmp_path, parallel={"compile": True}, **sections)
    with pytest.raises(UserError, match=r"freeze blocks in 5 different ways\n.*at most 8 of a block"):
        rules_of(config, config.model.architecture(300))
    rules_of(tiny.recipe(tmp_path, **sections), config.model.architecture(300))
    alike = [{"names": ["model.embed_tokens.weight", "model.layers.[0-2].*"], "frozen": True}]
    config = tiny.recipe(tmp_path, parallel={"compile": True}, model={"num_hidden_layers": 5}, optim={"groups": alike})
    rules_of(config, config.model.architecture(300))


def test_the_limit_is_torchs():
    import torch

    assert torch._dynamo.config.recompile_limit == 2 * MAX_KINDS
