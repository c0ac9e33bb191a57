"""Our names and the names in Hugging Face's files."""

import pytest

from tests.model.tiny import CASES, hf_model
from windlass.errors import UserError
from windlass.model.architecture import parameter_shapes
from windlass.model.config import architecture_from_hf
from windlass.model.names import Stored, expected_name, hugging_face_names, stored_shapes, stored_tensor
from windlass.optim.config import GroupConfig
from windlass.optim.rules import assign


def arch_of(family, tied=True):
    return architecture_from_hf(hf_model(family, tied).config.to_dict())


def one_by_one(model):
    """transformers holds a layer's experts in two tensors, and writes each into the file by itself."""
    for name, parameter in model.named_parameters():
        if model.config.model_type == "mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        experts, _, own = name.rpartition(".")
        if not experts.endswith(".experts"):
            yield name, parameter
            continue
        kinds = ("w1", "w3", "w2") if model.config.model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        for kind in kinds[:2] if own == "gate_up_proj" else kinds[2:]:
            part = parameter.chunk(2, dim=1)[kind == kinds[1]] if own == "gate_up_proj" else parameter
            yield from ((f"{experts}.{expert}.{kind}.weight", matrix) for expert, matrix in enumerate(part))


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_files_have_exactly_transformers_tensors(family, tied):
    model = hf_model(family, tied)
    theirs = {name: tuple(parameter.shape) for name, parameter in one_by_one(model)}
    assert stored_shapes(architecture_from_hf(model.config.to_dict())) == theirs


def test_every_family_but_gpt2_keeps_its_names():
    for family in ("llama", "qwen3", "mistral", "qwen2", "smollm3"):
        arch = arch_of(family)
        assert [stored_tensor(name, arch) for name in parameter_shapes(arch)] == list(
            map(Stored, parameter_shapes(arch))
        )


def test_experts_are_stored_one_by_one_and_called_by_one_name():
    arch = arch_of("qwen3_moe")
    name = "model.layers.2.mlp.experts.up_proj.weight"
    place = stored_tensor(name, arch)
    assert place.names == [f"model.layers.2.mlp.experts.{expert}.up_proj.weight" for expert in range(7)]
    assert hugging_face_names(arch)[name] == ("model.layers.2.mlp.experts.*.up_proj.weight",)
    with pytest.raises(UserError) as caught:
        assign([GroupConfig(names=["*.experts.3.up_proj.weight"], frozen=True)], hugging_face_names(arch))
    assert "model.layers.0.mlp.experts.*.up_proj.weight" in caught.value.change
    frozen = assign([GroupConfig(names=["*.experts.*"], frozen=True)], hugging_face_names(arch))
    assert len(frozen) == 6 and name in frozen  # two sparse layers, three matrices each


def test_gpt2s_projections_are_transposed_and_its_queries_keys_and_values_are_one_tensor():
    arch = arch_of("gpt2")
    place = stored_tensor("model.layers.2.self_attn.k_proj.weight", arch)
    assert place == Stored("transformer.h.2.attn.c_attn.weight", transposed=True, first=48, rows=144)
    assert stored_tensor("model.layers.2.self_attn.v_proj.bias", arch) == Stored(
        "transformer.h.2.attn.c_attn.bias", first=96, rows=144
    )
    assert stored_tensor("model.norm.bias", arch) == Stored("transformer.ln_f.bias")


@pytest.mark.parametrize(
    ("family", "key", "name"),
    [
        ("llama", "layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("gpt2", "h.0.ln_1.weight", "transformer.h.0.ln_1.weight"),
        ("gpt2", "h.0.attn.bias", None),
        ("qwen2", "model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("qwen2", "lm_head.weight", "lm_head.weight"),
        ("qwen2", "extra", "extra"),
    ],
)
def test_keys_of_other_writers_are_understood(family, key, name):
    arch = arch_of(family)
    assert expected_name(key, arch, stored_shapes(arch)) == name


def test_users_call_parameters_by_their_files_names_and_a_tied_pair_by_either():
    assert hugging_face_names(arch_of("qwen2"))["model.embed_tokens.weight"] == (
        "model.embed_tokens.weight",
        "lm_head.weight",
    )
    untied = hugging_face_names(arch_of("qwen2", tied=False))
    assert all(called == (name,) for name, called in untied.items()) and "lm_head.weight" in untied
    gpt2 = hugging_face_names(arch_of("gpt2"))
    assert gpt2["model.embed_tokens.weight"] == ("transformer.wte.weight", "lm_head.weight")
    parts = {gpt2[f"model.layers.1.self_attn.{part}_proj.bias"] for part in "qkv"}
    assert parts == {("transformer.h.1.attn.c_attn.bias",)}
