"""GPT-2's own fields: both names of its sizes, and what it refuses."""

import json
from dataclasses import replace

import pytest
from transformers import GPT2Config

from windlass.errors import UserError
from windlass.model.config import ModelConfig, architecture_from_hf
from windlass.model.families.family_table import to_hf

GPT2 = {"family": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 6}


def test_transformers_other_names_of_gpt2s_sizes_are_understood():
    fields = {"family": "gpt2", "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
    assert ModelConfig(**fields).architecture(211) == ModelConfig(**GPT2).architecture(211)


def test_the_inner_width_is_four_times_the_outer_when_left_out():
    assert ModelConfig(**GPT2).architecture(211).intermediate_size == 192
    assert to_hf(ModelConfig(**GPT2, n_inner=50).architecture(211))["n_inner"] == 50


def test_dropout_of_published_configs_is_accepted_and_goes_out_again():
    """GPT-2's config.json carries 0.1 at three places, or leaves them out, which means 0.1 too."""
    config = GPT2Config(vocab_size=211, n_embd=48, n_layer=3, n_head=6)
    arch = architecture_from_hf(config.to_dict())
    assert (arch.resid_dropout, arch.embd_dropout, arch.attn_dropout) == (0.1, 0.1, 0.1)
    assert ModelConfig(**GPT2).architecture(211).dropout == arch.dropout
    changed = replace(arch, resid_dropout=0.0, embd_dropout=0.2, attn_dropout=0.3)
    again = GPT2Config(**to_hf(changed))
    assert (again.resid_pdrop, again.embd_pdrop, again.attn_pdrop) == (0.0, 0.2, 0.3)
    assert architecture_from_hf(json.loads(json.dumps(to_hf(changed)))) == changed


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n_head": 5}, "n_embd 48 and n_head 5"),
        ({"n_head": 5}, "set n_head to one of [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: true"),
        ({"scale_attn_weights": False}, "accepted: scale_attn_weights: true"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn: true"),
        ({"resid_pdrop": 1.5}, "resid_pdrop: 1.5"),
        ({"num_key_value_heads": 2}, "num_key_value_heads: 2"),
        ({"embedding_norm": True}, "embedding_norm: true"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling: {"),
    ],
)
def test_what_is_not_gpt2_is_refused(fields, words):
    with pytest.raises(UserError) as caught:
        ModelConfig(**{**GPT2, **fields}).architecture(211)
    assert words in str(caught.value)
