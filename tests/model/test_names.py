"""Our names and the names in Hugging Face's files."""

import pytest

from tests.model.tiny import CASES, hf_model
from windlass.model.architecture import parameter_shapes
from windlass.model.config import architecture_from_hf
from windlass.model.names import Stored, expected_name, stored_as, stored_shapes


def arch_of(family, tied=True):
    return architecture_from_hf(hf_model(family, tied).config.to_dict())


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_files_have_exactly_transformers_tensors(family, tied):
    model = hf_model(family, tied)
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert stored_shapes(architecture_from_hf(model.config.to_dict())) == theirs


def test_every_family_but_gpt2_keeps_its_names():
    for family in ("llama", "qwen3", "mistral", "qwen2", "smollm3"):
        arch = arch_of(family)
        assert [stored_as(name, arch) for name in parameter_shapes(arch)] == list(map(Stored, parameter_shapes(arch)))


def test_gpt2s_projections_are_transposed_and_its_queries_keys_and_values_are_one_tensor():
    arch = arch_of("gpt2")
    place = stored_as("model.layers.2.self_attn.k_proj.weight", arch)
    assert place == Stored("transformer.h.2.attn.c_attn.weight", transposed=True, part=1, parts=3)
    assert stored_as("model.layers.2.self_attn.v_proj.bias", arch) == Stored(
        "transformer.h.2.attn.c_attn.bias", part=2, parts=3
    )
    assert stored_as("model.norm.bias", arch) == Stored("transformer.ln_f.bias")


@pytest.mark.parametrize(
    ("family", "key", "name"),
    [
        ("llama", "layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("gpt2", "h.0.ln_1.weight", "transformer.h.0.ln_1.weight"),
        ("gpt2", "h.0.attn.bias", None),
        ("qwen2", "model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("qwen2", "lm_head.weight", None),
        ("qwen2", "extra", "extra"),
    ],
)
def test_keys_of_other_writers_are_understood(family, key, name):
    arch = arch_of(family)
    assert expected_name(key, arch, stored_shapes(arch)) == name


def test_an_untied_head_is_no_copy():
    arch = arch_of("qwen2", tied=False)
    assert expected_name("lm_head.weight", arch, stored_shapes(arch)) == "lm_head.weight"
