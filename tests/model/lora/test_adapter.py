"""Which matrices carry factors, by the names that users give; shapes; what a linear layer computes with them."""

import math

import pytest
import torch
from torch.nn import functional

from windlass.adapters.config import AdapterConfig
from windlass.errors import UserError
from windlass.model.config import ModelConfig
from windlass.model.lora.adapter import adapted_shapes, adapter_of, called, frozen_base, trained_shapes
from windlass.model.lora.linear import Linear, adapt, merge
from windlass.model.transformer import Decoder

QWEN3 = {
    "family": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
QWEN3 |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 100}
GPT2 = {"family": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100}
MOE = {
    "family": "qwen3_moe",
    **{k: v for k, v in QWEN3.items() if k != "family"},
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
MOE |= {"moe_intermediate_size": 32, "mlp_only_layers": [0]}


def architecture(fields):
    return ModelConfig.model_validate(fields).architecture()


def adapter(fields, **settings):
    return adapter_of(AdapterConfig(kind="lora", **settings), architecture(fields))


def kinds(found):
    return sorted({name.rpartition(".")[2] for name in found.targets}), len(found.targets)


@pytest.mark.parametrize(
    ("fields", "settings", "expected"),
    [
        (QWEN3, {}, (["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"], 14)),
        (QWEN3, {"targets": ["q_proj", "v_proj"]}, (["q_proj", "v_proj"], 4)),
        (QWEN3, {"targets": ["0.self_attn.q_proj"]}, (["q_proj"], 1)),
        (GPT2, {}, (["down_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"], 12)),
        (GPT2, {"targets": ["c_attn"]}, (["k_proj", "q_proj", "v_proj"], 6)),
        (GPT2, {"targets": ["c_proj"]}, (["down_proj", "o_proj"], 4)),
        (MOE, {}, (["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"], 8 + 3)),
    ],
    ids=["all", "named", "of one layer", "gpt2", "gpt2 fused", "gpt2 both", "experts"],
)
def test_targets(fields, settings, expected):
    assert kinds(adapter(fields, **settings)) == expected


def test_shapes_are_those_of_the_model():
    """The torch-free shapes, against the decoder itself."""
    for fields, settings in (
        (QWEN3, {}),
        (QWEN3, {"base": "nf4", "also_train": ["*norm*"]}),
        (GPT2, {"targets": ["c_attn"]}),
    ):
        found = adapter(fields, **settings)
        with torch.device("meta"):
            model = Decoder(architecture(fields), adapter=found)
        held = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        shapes = adapted_shapes(architecture(fields), found, padded=True)
        assert held == {name: shape for name, shape in shapes.items() if name in held} and shapes.keys() == held.keys()
        assert (
            frozen_base(architecture(fields), found) | trained_shapes(architecture(fields), found).keys() == held.keys()
        )


def test_a_user_names_factors_by_their_own_names():
    names = called(architecture(GPT2), adapter(GPT2, targets=["c_attn"], also_train=["*ln_f*"]))
    assert names["model.layers.0.self_attn.q_proj.lora_B.weight"] == ("transformer.h.0.attn.c_attn.lora_B.weight",)
    assert names["model.norm.weight"] == ("transformer.ln_f.weight",) and len(names) == 2 * 3 * 2 + 2


def test_nothing_is_called_by_a_name_that_is_frozen():
    assert not any("embed" in name for name in called(architecture(QWEN3), adapter(QWEN3)))


@pytest.mark.parametrize(
    ("fields", "settings", "words"),
    [
        (QWEN3, {"targets": ["qproj"]}, "did you mean `q_proj`?"),
        (QWEN3, {"targets": ["lm_head"]}, "names of matrices in attention and MLP"),
        ({**MOE, "mlp_only_layers": []}, {"targets": ["up_proj"]}, "this model's MLPs are experts"),
        (MOE, {"base": "nf4"}, "adapter.base=nf4 for a model of 4 experts"),
        ({**QWEN3, "hidden_size": 72}, {"base": "nf4"}, "adapter.base=nf4 for matrices of 72 inputs"),
        (QWEN3, {"also_train": ["nothing"]}, "adapter.also_train has 'nothing'"),
        (QWEN3, {"targets": ["q_proj"], "also_train": ["*q_proj*"]}, "adapter.also_train too"),
        (QWEN3, {"also_train": ["*"]}, "at least one matrix with factors"),
    ],
)
def test_refusals(fields, settings, words):
    with pytest.raises(UserError) as caught:
        adapter(fields, **settings)
    assert words in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("settings", "scale"), [({"rank": 8, "alpha": 16}, 2.0), ({"rank": 16, "alpha": 8, "rank_stabilized": True}, 2.0)]
)
def test_scale(settings, scale):
    assert AdapterConfig(kind="lora", **settings).scale == scale


def test_a_layer_adds_the_product_of_its_factors():
    draw = torch.Generator().manual_seed(3)
    layer, x = Linear(6, 5, bias=True).double(), torch.randn(4, 6, generator=draw).double()
    plain = layer(x)
    layer.add_factors(2, 3.0)
    layer.double()
    a, b = layer.lora_A.weight, layer.lora_B.weight
    with torch.no_grad():
        for factor in (a, b):
            factor.copy_(torch.randn(factor.shape, generator=draw))
    expected = functional.linear(x, layer.weight + 3.0 * b @ a, layer.bias)
    assert (layer(x) - expected).abs().max() <= 1e-14 and not torch.allclose(layer(x), plain)


def test_merged_it_computes_the_same():
    arch, found = architecture(QWEN3), adapter(QWEN3, rank=4, alpha=6)
    torch.manual_seed(0)
    model = Decoder(arch, adapter=found).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    ids = torch.arange(12).view(2, 6)
    expected = model(ids)
    plain = Decoder(arch).double()
    tensors = dict(model.named_parameters())
    plain.load_state_dict({name: tensor for name, tensor in tensors.items() if ".lora_" not in name}, strict=False)
    plain.tie()
    assert (plain(ids) - expected).abs().max() > 1e-3
    merge(plain, tensors, found)
    assert (plain(ids) - expected).abs().max() <= 1e-12


def test_without_an_adapter_a_layer_is_torchs_own():
    layer, x = Linear(6, 5, bias=False), torch.randn(4, 6)
    assert torch.equal(layer(x), functional.linear(x, layer.weight))
    adapt(layer, architecture(QWEN3), None)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]


def test_factors_begin_at_zero_together():
    """B is 0; A has the variance of PEFT's draw."""
    from windlass.model.init import initialise

    arch, found = architecture({**QWEN3, "hidden_size": 640}), adapter({**QWEN3, "hidden_size": 640}, rank=64)
    with torch.device("meta"):
        model = Decoder(arch, adapter=found)
    model.to_empty(device="cpu")
    named = {name: p for name, p in model.named_parameters() if ".lora_" in name}
    initialise(named.items(), arch, seed=1)
    for name, parameter in named.items():
        if "lora_B" in name:
            assert not parameter.any()
        elif "q_proj" in name:
            assert float(parameter.detach().std()) == pytest.approx(1 / math.sqrt(3 * 640), rel=0.02)
