"""Which group decides for which parameter, and what is refused."""

import re

import pytest

from windlass.errors import UserError
from windlass.model.config import ModelConfig
from windlass.model.names import hugging_face_names
from windlass.optim.config import GroupConfig
from windlass.optim.rules import assign, frozen_names

QWEN3 = {
    "family": "qwen3",
    "vocab_size": 150,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
GPT2 = {"family": "gpt2", "vocab_size": 150, "n_embd": 24, "n_layer": 2, "n_head": 3}


def names(model=QWEN3, tied=True):
    return hugging_face_names(ModelConfig.model_validate({**model, "tie_word_embeddings": tied}).architecture())


def group(*patterns, **settings):
    return GroupConfig(names=list(patterns), **settings)


def test_the_first_group_that_names_a_parameter_decides_alone():
    groups = [
        group("*norm*", weight_decay=0.0),
        group("model.layers.0.*", frozen=True),
        group("*", learning_rate_scale=0.5),
    ]
    rules = assign(groups, names(tied=False))
    assert set(rules) == set(names(tied=False))
    assert rules["model.layers.0.input_layernorm.weight"] is groups[0], "its rate is not scaled: nothing is merged"
    assert rules["model.layers.0.self_attn.q_proj.weight"] is groups[1]
    assert rules["lm_head.weight"] is rules["model.layers.1.mlp.up_proj.weight"] is groups[2]
    assert frozen_names(rules) == {n for n in names() if n.startswith("model.layers.0.") and "norm" not in n}


def test_what_no_group_names_has_no_rule():
    assert list(assign([group("model.norm.weight", weight_decay=0.1)], names())) == ["model.norm.weight"]
    assert assign([], names()) == {}


def test_a_group_that_sets_nothing_exempts():
    rules = assign([group("*norm*"), group("model.layers.*", frozen=True)], names())
    assert not any("norm" in name for name in frozen_names(rules)) and len(frozen_names(rules)) == 2 * 7


def test_gpt2s_own_names_and_its_fused_projection():
    rules = assign(
        [group("transformer.h.0.attn.c_attn.*", frozen=True), group("transformer.wte.weight", weight_decay=0.0)],
        names(GPT2),
    )
    parts = {f"model.layers.0.self_attn.{x}_proj.{kind}" for x in "qkv" for kind in ("weight", "bias")}
    assert frozen_names(rules) == parts
    assert rules["model.embed_tokens.weight"].weight_decay == 0.0
    with pytest.raises(UserError, match=r"'model.embed_tokens.weight'"):
        assign([group("model.embed_tokens.weight", frozen=True)], names(GPT2))


def test_either_name_of_a_tied_pair_names_the_tensor():
    for name in ("lm_head.weight", "model.embed_tokens.weight", "lm_head.*"):
        assert frozen_names(assign([group(name, frozen=True)], names())) == {"model.embed_tokens.weight"}
    assert frozen_names(assign([group("lm_head.weight", frozen=True)], names(tied=False))) == {"lm_head.weight"}


REFUSED = {
    "a typing mistake": (
        [group("model.layers.0.self_atn.q_proj.weight", frozen=True)],
        "optim.groups[0].names has 'model.layers.0.self_atn.q_proj.weight'\n"
        "  rule:   a pattern matches at least one of the model's 25 parameter names, and this one matches none\n"
        "  change: the nearest names: model.layers.0.self_attn.q_proj.weight, ",
    ),
    "a layer that is not there": (
        [group("*norm*", weight_decay=0.1), group("*", "model.layers.7.*", frozen=True)],
        "optim.groups[1].names has 'model.layers.7.*'",
    ),
    "nothing like it": (
        [group("zzz", frozen=True)],
        "the nearest names: model.embed_tokens.weight, lm_head.weight, model.layers.0",
    ),
    "everything": ([group("*", frozen=True)], "optim.groups freezes all 24 parameters"),
    "everything, in parts": (
        [group("*norm*", frozen=True), group("*", frozen=True)],
        "optim.groups freezes all 24 parameters",
    ),
    "too late": (
        [group("*", learning_rate_scale=0.5), group("*norm*", weight_decay=0.1)],
        "optim.groups[1] names *norm*\n  rule:   the first group that names a parameter decides, and groups before it name all",
    ),
    "an exemption from nothing": (
        [group("model.layers.*", frozen=True), group("model.norm.weight")],
        "optim.groups[1] sets nothing for model.norm.weight",
    ),
    "an exemption that no later group needs": (
        [group("*norm*"), group("lm_head.weight", frozen=True)],
        "optim.groups[0] sets nothing for *norm*",
    ),
    "two settings of one tensor": (
        [group("lm_head.weight", learning_rate_scale=0.5), group("model.embed_tokens.weight", frozen=True)],
        "optim.groups[1] names model.embed_tokens.weight and optim.groups[0] names lm_head.weight, with different settings",
    ),
    "two settings through a pattern": (
        [group("lm_head.weight", learning_rate_scale=0.5), group("*", weight_decay=0.2)],
        "before any pattern that matches either: names: [model.embed_tokens.weight, lm_head.weight]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    groups, said = REFUSED[case]
    with pytest.raises(UserError, match=re.escape(said)):
        assign(groups, names())


def test_one_setting_of_one_tensor_may_be_written_twice():
    groups = [group("lm_head.weight", weight_decay=0.2), group("*", weight_decay=0.2)]
    assert assign(groups, names())["model.embed_tokens.weight"] is groups[0]


def test_what_the_refusal_of_a_tied_pair_offers_is_accepted():
    groups = [
        group("model.embed_tokens.weight", "lm_head.weight", learning_rate_scale=0.5),
        group("*", weight_decay=0.2),
    ]
    assert assign(groups, names())["model.embed_tokens.weight"] is groups[0]
