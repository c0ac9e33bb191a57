"""Random Hugging Face configs: each is equal to transformers in logits and gradients, or refused; never a third thing.

Compared in fp64, where transformers' detours through fp32 are off, so that a difference is a mistake and not noise.
"""

import copy
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.model.tiny import BOTH, FAMILIES
from tests.model.whole.parity import check_parity, without_detours_through_fp32
from windlass.errors import UserError
from windlass.model.config import architecture_from_hf

LENGTH = 17  # of the batch that is compared


def some_rope(draw):
    """Nothing, one of the spellings, now and then one that is not implemented or makes no sense."""
    theta = draw.choice([None, 1.5, 77.0, 500.0, 1e4, 1000000])
    kinds = ["none", "default", "linear", "llama3", "yarn", "dynamic", "longrope"]
    (kind,) = draw.choices(kinds, [20, 10, 10, 20, 30, 3, 3])
    if kind == "none":
        return {} if theta is None else {"rope_theta": theta}
    scaling = {"rope_type": kind}
    if kind != "default":
        scaling["factor"] = draw.choice([1.0, 2, 2.5, 8.0, draw.uniform(1, 40), draw.uniform(0.8, 3)])
    if kind == "llama3":
        low = draw.uniform(0.1, 3)
        scaling |= {"low_freq_factor": low, "high_freq_factor": low + draw.choice([draw.uniform(0, 5), 0.5, 3.0, 0.0])}
    if kind in ("llama3", "yarn") and draw.random() < 0.8:
        scaling["original_max_position_embeddings"] = draw.randint(1, 200)
    if kind == "yarn":
        for name, value in {
            "beta_fast": draw.uniform(4, 64),
            "beta_slow": draw.uniform(0.01, 3),
            "attention_factor": draw.uniform(0.1, 2),
            "mscale": draw.uniform(0.1, 2),
            "mscale_all_dim": draw.uniform(0.1, 2),
            "truncate": draw.random() < 0.5,
        }.items():
            if draw.random() < 0.3:
                scaling[name] = value
    if draw.random() < 0.05:
        scaling["beta_fast" if kind == "linear" else "finetuned"] = 3.0
    if draw.random() < 0.5:
        return {"rope_parameters": {**scaling, **({} if theta is None else {"rope_theta": theta})}}
    older = {"type" if name == "rope_type" else name: value for name, value in scaling.items()}
    return {"rope_scaling": older, **({} if theta is None else {"rope_theta": theta})}


def some_windows(draw, family, layers):
    fields = {}
    if family == "mistral":
        return {"sliding_window": draw.choice([None, 1, 4, LENGTH, 40])}
    if family in ("qwen2", "qwen3", "smollm3") and draw.random() < 0.4:
        fields = {
            "use_sliding_window": draw.random() < 0.8,
            "sliding_window": draw.choice([None, 1, 5, LENGTH - 1, 99]),
        }
        if family != "smollm3":
            fields["max_window_layers"] = draw.randint(-1, layers + 1)
        if draw.random() < 0.3:
            count = layers if draw.random() < 0.9 else layers + 1
            fields["layer_types"] = [draw.choice(["full_attention", "sliding_attention"]) for _ in range(count)]
    if family == "smollm3" and draw.random() < 0.7:
        count = layers + draw.choice([0, 0, 0, 2, -1])
        positions = {"no_rope_layers": [draw.randint(0, 1) for _ in range(count)]}
        fields |= positions if draw.random() < 0.5 else {"no_rope_layer_interval": draw.randint(1, 5)}
    return fields


def some_experts(draw, layers):
    experts = draw.randint(1, 9)
    fields = {
        "num_experts": experts,
        "num_experts_per_tok": draw.randint(1, experts) if draw.random() < 0.95 else experts + 1,
        "moe_intermediate_size": draw.randint(1, 24),
        "norm_topk_prob": draw.random() < 0.5,
        "output_router_logits": draw.random() < 0.5,
        "experts_implementation": "eager",
    }
    if draw.random() < 0.4:
        fields["mlp_only_layers"] = draw.sample(range(layers + 1), draw.randint(0, layers))
    if draw.random() < 0.3:
        fields["decoder_sparse_step"] = draw.randint(1, 3)
    if draw.random() < 0.3:
        fields |= {
            "use_sliding_window": draw.random() < 0.8,
            "sliding_window": draw.choice([None, 1, 5, LENGTH - 1, 99]),
        }
    return fields


def common(draw):
    vocab_size = draw.randint(3, 300)
    pad = draw.choice([None, 0, draw.randrange(vocab_size), vocab_size if draw.random() < 0.1 else None])
    return {
        "vocab_size": vocab_size,
        "bos_token_id": 1,
        "eos_token_id": draw.choice([2, [1, 2], None]),
        "pad_token_id": pad,
        "initializer_range": 0.1,
        "tie_word_embeddings": draw.random() < 0.5,
    }


def some_gpt2(draw):
    heads = draw.randint(1, 5)
    fields = {
        "n_embd": heads * draw.randint(1, 9) if draw.random() < 0.9 else draw.randint(1, 40),
        "n_layer": draw.randint(1, 4),
        "n_head": heads,
        "n_positions": draw.randint(LENGTH, 60),
        "n_inner": draw.choice([None, draw.randint(1, 80)]),
        "activation_function": draw.choice(["gelu_new", "gelu", "relu", "silu", "swish", "gelu_pytorch_tanh"]),
        "layer_norm_epsilon": draw.choice([1e-5, 1e-3]),
    }
    if draw.random() < 0.1:
        fields |= draw.choice(
            [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}, {"activation_function": "tanh"}]
        )
    return fields


def some_layer_ropes(draw, family):
    """Of olmo3 and gemma3: a rope for each kind of layer, in one spelling or the other."""
    beside = draw.choice([{}, {"rope_theta": draw.choice([77.0, 1e4])}])
    if family == "gemma3_text" and draw.random() < 0.3:
        beside["rope_local_base_freq"] = draw.choice([5.5, 1e3])
    if draw.random() < 0.4:
        return beside
    rope = some_rope(draw)
    if (scaling := rope.get("rope_scaling")) is not None:
        return {**beside, "rope_scaling": {"rope_type" if name == "type" else name: v for name, v in scaling.items()}}
    nested = {name: some_rope(draw).get("rope_parameters") for name in ("full_attention", "sliding_attention")}
    nested = {name: one for name, one in nested.items() if one is not None or draw.random() < 0.1}
    return {**beside, "rope_parameters": nested} if nested else beside


def some_of_its_own(draw, family, layers):
    """The fields that only this family has, and those of its layers."""
    fields = {}
    if family in ("gemma3_text", "gemma2", "olmo3", "exaone4", "cohere2"):
        fields["sliding_window"] = draw.choice([1, 4, LENGTH, 40])
        if draw.random() < 0.5:
            count = layers if draw.random() < 0.9 else layers + 1
            fields["layer_types"] = [draw.choice(["full_attention", "sliding_attention"]) for _ in range(count)]
    if family in ("gemma3_text", "cohere2", "exaone4") and draw.random() < 0.6:
        fields["sliding_window_pattern"] = draw.randint(1, 5)
    if family in ("gemma3_text", "gemma2"):
        fields["query_pre_attn_scalar"] = draw.randint(1, 40)
        fields["final_logit_softcapping"] = draw.choice([None, 0.5, 3.0])
    if family in ("phi3", "glm4"):
        fields["head_dim"] = draw.choice([8, 16, 4 * draw.randint(1, 5)])
        if draw.random() < 0.7:
            fields["partial_rotary_factor"] = draw.choice([0.25, 0.5, 0.75, 1.0, draw.random()])
    own = {
        "mixtral": {
            "num_local_experts": (experts := draw.randint(1, 9)),
            "num_experts_per_tok": draw.randint(1, experts) if draw.random() < 0.95 else experts + 1,
            "output_router_logits": draw.random() < 0.5,
            "sliding_window": draw.choice([None, 1, 4, LENGTH, 40]),
            "router_jitter_noise": draw.choice([0.0] * 19 + [0.1]),
            "experts_implementation": "eager",
        },
        "granite": {
            name: draw.choice([1.0, 12, 0.22, draw.uniform(0.01, 9)])
            for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
        },
        "phi3": {"sliding_window": draw.choice([None, 1, 4, LENGTH]), "resid_pdrop": draw.choice([0.0, 0.1])},
        "gemma2": {"attn_logit_softcapping": draw.choice([None, 0.5, 20.0])},
        "starcoder2": {"use_bias": draw.random() < 0.5, "sliding_window": draw.choice([None, 1, 4, LENGTH])},
        "exaone4": {"sliding_window": None} if draw.random() < 0.1 else {},
        "ernie4_5": {"use_bias": draw.choice([True, False, None])},
        "cohere2": {"logit_scale": draw.uniform(0.01, 3)},
    }.get(family, {})
    biased = ("olmo2", "olmo3", "granite", "gemma2", "gemma3_text", "glm4", "cohere2")
    if family in biased and draw.random() < 0.5:
        fields["attention_bias"] = draw.random() < 0.7
    if family == "granite" and draw.random() < 0.5:
        fields["mlp_bias"] = draw.random() < 0.7
    return {**fields, **own}


RENAMED = {
    "gemma2": {"hidden_act": "hidden_activation"},
    "gemma3_text": {"hidden_act": "hidden_activation"},
    "starcoder2": {"rms_norm_eps": "norm_epsilon"},
    "cohere2": {"rms_norm_eps": "layer_norm_eps"},
    "ernie4_5": {"attention_dropout": None},  # transformers passes over it: refused here unless it is 0
}


def some_config(family, index):
    draw = random.Random(f"{family}/{index}")
    if family == "gpt2":
        return {**common(draw), **some_gpt2(draw)}
    heads, layers = draw.choice([1, 2, 3, 4, 6]), draw.randint(1, 4)
    own_head_dim = draw.random() < 0.5
    kv_heads = draw.choice([count for count in range(1, heads + 1) if heads % count == 0])
    fields = {
        "hidden_size": heads * draw.choice([2, 4, 6, 10]) if draw.random() < 0.95 else draw.randint(1, 50),
        "intermediate_size": draw.randint(1, 80),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads if draw.random() < 0.95 else draw.randint(1, 6),
        "hidden_act": draw.choice(["silu"] * 5 + ["gelu", "relu", "swish", "gelu_pytorch_tanh", "mish"]),
        "max_position_embeddings": draw.randint(LENGTH, 256),
        "rms_norm_eps": draw.choice([1e-6, 1e-5, 1e-3]),
        "attention_dropout": draw.choice([0.0, 0.0, 0.1]),
    }
    if own_head_dim:
        fields["head_dim"] = draw.choice([2, 4, 6, 10, 14, 16, draw.randint(1, 12)])
    if family in ("llama", "qwen3", "smollm3", "qwen3_moe") and draw.random() < 0.5:
        fields["attention_bias"] = draw.random() < 0.7
    if family in ("llama", "smollm3") and draw.random() < 0.5:
        fields["mlp_bias"] = draw.random() < 0.7
    if family == "qwen3_moe":
        fields |= some_experts(draw, layers)
    if draw.random() < 0.05:
        fields |= draw.choice([{"logit_scale": 2.0}, {"qk_layernorm": True}, {"partial_rotary_factor": 0.5}])
    if family in BOTH:
        return {**common(draw), **fields, **some_rope(draw), **some_windows(draw, family, layers)}
    if fields["hidden_act"] == "mish":
        fields["hidden_act"] = draw.choice(["mish", "silu"])
    if fields.get("head_dim", 2) % 2:
        fields["head_dim"] += draw.choice([0, 1, 1])
    if family == "mixtral":  # whose head_dim transformers leaves at null, and its yarn needs one
        fields.setdefault("head_dim", 4)
    renamed = RENAMED.get(family, {})
    fields = {renamed.get(name, name): value for name, value in fields.items() if renamed.get(name, name)}
    rope = some_layer_ropes(draw, family) if family in ("gemma3_text", "olmo3") else some_rope(draw)
    if family == "phi3" and draw.random() < 0.9:  # scaled ropes are refused
        rope = {"rope_theta": draw.choice([77.0, 1e6])}
    return {**common(draw), **fields, **rope, **some_of_its_own(draw, family, layers)}


def equal_or_refused(family, index):
    """True if equal, False if refused; fails otherwise."""
    fields = some_config(family, index)
    try:
        known = {name: value for name, value in copy.deepcopy(fields).items() if name != "experts_implementation"}
        arch = architecture_from_hf({"model_type": family, **known})
    except UserError as refusal:
        assert refusal.given and refusal.rule and refusal.change
        return False
    torch.manual_seed(index)
    config = FAMILIES[family][0](**copy.deepcopy(fields))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    assert architecture_from_hf(config.to_dict()) == arch
    with without_detours_through_fp32(model):
        check_parity(model, 1e-11, 1e-9, floor=1e-3)
    return True


def check_range(family, indices):
    equal, failures = 0, []
    for index in indices:
        try:
            equal += equal_or_refused(family, index)
        except Exception as error:  # anything else is the third thing: named with its config
            failures.append(
                f"{family} {index} {some_config(family, index)}: {type(error).__name__}: {str(error)[:300]}"
            )
    assert not failures, "\n".join(failures)
    assert equal >= len(indices) / 2, f"only {equal} of {len(indices)} were compared"


@pytest.mark.parametrize("family", FAMILIES)
def test_ten_random_configs_are_equal_or_refused(family):
    check_range(family, range(10))


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_three_hundred_random_configs_are_equal_or_refused(family):
    check_range(family, range(10, 310))
