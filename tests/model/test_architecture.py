"""The record that the decoder is built from: shapes, padding, and what no model may be."""

import pytest
import torch

from windlass.errors import UserError
from windlass.model.architecture import describe_dropout, parameter_shapes
from windlass.model.config import ModelConfig
from windlass.model.transformer import Decoder

SIZES = {"hidden_size": 48, "intermediate_size": 76, "num_hidden_layers": 3, "num_attention_heads": 6}
LLAMA = {"family": "llama", **SIZES}
GPT2 = {"family": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 6}


@pytest.mark.parametrize("preset", ["gpt2-124m", "qwen3-4b", "llama-2-13b", "qwen2.5-1.5b", "smollm3-3b"])
def test_parameters_are_those_the_shapes_promise(preset):
    arch = ModelConfig(preset=preset).architecture()
    with torch.device("meta"):
        decoder = Decoder(arch)
    shapes = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    assert list(shapes.items()) == list(parameter_shapes(arch, padded=True).items())
    assert not list(decoder.buffers())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_key_value_heads": 4}, "6 attention heads and 4 key/value heads"),
        ({"hidden_size": 2**24 + 8}, "model: hidden_size 16,777,224, num_attention_heads x head_dim 16,777,224"),
        ({"vocab_size": 10**12}, "model: vocab_size 1,000,000,000,000"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers must be at most 10000"),
        ({"num_key_value_heads": 4}, "one of [1, 2, 3, 6]"),
        ({"family": "qwen3", "num_key_value_heads": 2, "head_dim": 9}, "set head_dim to 8 or 10"),
        ({"pad_token_id": 211}, "pad_token_id 211 and vocab_size 211"),
        ({"pad_token_id": -1}, "pad_token_id -1 and vocab_size 211"),
    ],
)
def test_what_no_model_may_be_is_refused(fields, words):
    with pytest.raises(UserError) as caught:
        ModelConfig(**{**LLAMA, **fields}).architecture(211)
    assert words in str(caught.value)


@pytest.mark.parametrize(("rows", "padded"), [(1, 128), (128, 128), (129, 256), (50257, 50304)])
def test_the_vocabulary_is_padded_to_a_multiple_of_128_in_memory_only(rows, padded):
    arch = ModelConfig(**LLAMA).architecture(rows)
    assert arch.padded_vocab_size == padded
    assert parameter_shapes(arch)["lm_head.weight"] == (rows, 48)
    assert parameter_shapes(arch, padded=True)["lm_head.weight"] == (padded, 48)


def test_dropout_says_what_it_costs_and_how_attentions_is_turned_off():
    arch = ModelConfig(**GPT2, embd_pdrop=0.0).architecture(211)
    assert arch.dropout == {"resid_pdrop": 0.1, "attn_pdrop": 0.1}
    said = describe_dropout(arch)
    assert said.startswith("resid_pdrop 0.1, attn_pdrop 0.1 (the same in every layout)")
    assert "about 3 times the fused kernel's time" in said and said.endswith("model.attn_pdrop=0.0 turns that off")
    without = describe_dropout(ModelConfig(**GPT2, attn_pdrop=0.0, embd_pdrop=0.25).architecture(211))
    assert without == "resid_pdrop 0.1, embd_pdrop 0.25 (the same in every layout)"
    assert "model.attention_dropout=0.0" in describe_dropout(
        ModelConfig(**LLAMA, attention_dropout=0.2).architecture(211)
    )
    assert describe_dropout(ModelConfig(preset="gpt2-124m").architecture()) == ""
