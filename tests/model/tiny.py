"""Tiny Hugging Face models with odd sizes, and the same weights in our decoder.

Sizes are chosen so that a swapped or assumed dim cannot pass: vocabulary not divisible by 128, head_dim other than
hidden / heads for qwen3, grouped heads, odd MLP width. Norms and biases are perturbed: at 1 and 0 they hide mistakes.
Matrices have std 0.1: with more, and with less, transformers' own fp32 gradients are further from its fp64 ones.
"""

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from windlass.model.config import architecture_from_hf
from windlass.model.transformer import Decoder

LLAMA = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
QWEN3 = {
    **LLAMA,
    "head_dim": 10,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
QWEN3_MOE = {
    **QWEN3,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "experts_implementation": "eager",
}
MIXTRAL = {
    **LLAMA,
    "intermediate_size": 72,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "experts_implementation": "eager",
}
GRANITE = {
    **LLAMA,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.6,
}
PHI3 = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
    "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
}
GEMMA = {
    **LLAMA,
    "head_dim": 10,
    "query_pre_attn_scalar": 3,
    "sliding_window": 5,
}
GPT2 = {
    "vocab_size": 211,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 40,
    "n_inner": 76,
    "initializer_range": 0.1,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2_LINEAR = {"self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
FAMILIES = {
    "llama": (LlamaConfig, LLAMA),
    "qwen3": (Qwen3Config, QWEN3),
    "gpt2": (GPT2Config, GPT2),
    "mistral": (MistralConfig, {**LLAMA, "sliding_window": 7}),
    "qwen2": (Qwen2Config, {**LLAMA, "num_key_value_heads": 3}),
    "smollm3": (SmolLM3Config, {**LLAMA, "no_rope_layer_interval": 2}),
    "qwen3_moe": (Qwen3MoeConfig, QWEN3_MOE),
    "mixtral": (MixtralConfig, MIXTRAL),
    "olmo2": (Olmo2Config, LLAMA),
    "granite": (GraniteConfig, GRANITE),
    "phi3": (Phi3Config, PHI3),
    "gemma3_text": (Gemma3TextConfig, {**GEMMA, "sliding_window_pattern": 2}),
    "gemma2": (Gemma2Config, {**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5}),
    "olmo3": (Olmo3Config, {**LLAMA, "sliding_window": 5, "layer_types": LAYERS, "rope_parameters": ROPES}),
    "starcoder2": (Starcoder2Config, {**LLAMA, "sliding_window": 9, "pad_token_id": 0}),
    "glm4": (Glm4Config, {**LLAMA, "head_dim": 12}),
    "exaone4": (Exaone4Config, {**LLAMA, "head_dim": 10, "sliding_window": 5, "sliding_window_pattern": 2}),
    "ernie4_5": (Ernie4_5Config, {**LLAMA, "head_dim": 10, "use_bias": True}),
    "cohere2": (Cohere2Config, {**LLAMA, "sliding_window": 5, "layer_types": LAYERS, "logit_scale": 0.4}),
}
TIED = ("gemma3_text", "gemma2", "starcoder2", "ernie4_5", "cohere2")  # in transformers' defaults
BOTH = ("llama", "qwen3", "gpt2", "mistral", "qwen2", "smollm3", "qwen3_moe")
CASES = [(family, tied) for family in FAMILIES for tied in (False, True) if family in BOTH or tied == (family in TIED)]
# Stretched so that at these sizes some channels are kept, some divided and some between.
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 40,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 24.0,
        "beta_slow": 0.5,
        "mscale": 0.7,
        "mscale_all_dim": 1.4,
        "truncate": False,
    },
    "yarn-attention": {"rope_type": "yarn", "factor": 2.5, "attention_factor": 0.8},
}


def hf_model(family, tied, dtype=torch.float32, **changes):
    """A random transformers model whose norms and biases are not trivial."""
    make, fields = FAMILIES[family]
    torch.manual_seed(3)
    model = (
        AutoModelForCausalLM.from_config(make(**{**fields, "tie_word_embeddings": tied, **changes})).to(dtype).eval()
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def canonical(state, arch):
    """Hugging Face's tensors under our names, unpadded; apart from windlass.model.hf, so that one checks the other."""
    if arch.family in ("qwen3_moe", "mixtral"):
        state = split_experts(state)
    state = {called_here(name, arch.family): tensor for name, tensor in state.items()}
    if arch.family in ("phi3", "glm4"):
        state = unfused(state, arch)
    if arch.family != "gpt2":
        return {name: tensor for name, tensor in state.items() if not (arch.tied and name == "lm_head.weight")}
    named = {
        "model.embed_tokens.weight": state["transformer.wte.weight"],
        "model.embed_positions.weight": state["transformer.wpe.weight"],
        "model.norm.weight": state["transformer.ln_f.weight"],
        "model.norm.bias": state["transformer.ln_f.bias"],
    }
    if not arch.tied:
        named["lm_head.weight"] = state["lm_head.weight"]
    for layer in range(arch.num_layers):
        theirs, ours = f"transformer.h.{layer}.", f"model.layers.{layer}."
        for kind in ("weight", "bias"):
            fused = state[f"{theirs}attn.c_attn.{kind}"].chunk(3, dim=-1)
            for name, part in zip(("q_proj", "k_proj", "v_proj"), fused, strict=True):
                named[f"{ours}self_attn.{name}.{kind}"] = part.T if kind == "weight" else part
            for name, other in GPT2_LINEAR.items():
                tensor = state[f"{theirs}{other}.{kind}"]
                named[f"{ours}{name}.{kind}"] = tensor.T if kind == "weight" else tensor
            named[f"{ours}input_layernorm.{kind}"] = state[f"{theirs}ln_1.{kind}"]
            named[f"{ours}post_attention_layernorm.{kind}"] = state[f"{theirs}ln_2.{kind}"]
    return named


NORMS_AFTER = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
NORMS_AROUND = {**NORMS_AFTER, "pre_feedforward_layernorm": "post_attention_layernorm"}
CALLED = {
    "olmo2": NORMS_AFTER,
    "olmo3": NORMS_AFTER,
    "exaone4": NORMS_AFTER,
    "gemma2": NORMS_AROUND,
    "gemma3_text": NORMS_AROUND,
    "starcoder2": {"c_fc": "up_proj", "c_proj": "down_proj"},
}


def called_here(name, family):
    """What a module is called here that transformers calls otherwise."""
    before, own, kind = ("", *name.rsplit(".", 2))[-3:]
    return ".".join((before, CALLED.get(family, {}).get(own, own), kind)).lstrip(".")


def unfused(state, arch):
    """Query, key and value, and gate and up, where transformers has one matrix."""
    named = {}
    queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    for name, tensor in state.items():
        before, own, kind = ("", *name.rsplit(".", 2))[-3:]
        if own == "qkv_proj":
            parts = tensor.split([queries, keys, keys])
            named |= {f"{before}.{part}_proj.{kind}": one for part, one in zip("qkv", parts, strict=True)}
        elif own == "gate_up_proj":
            named[f"{before}.gate_proj.{kind}"], named[f"{before}.up_proj.{kind}"] = tensor.chunk(2)
        else:
            named[name] = tensor
    return named


def split_experts(state):
    """transformers joins gate and up of all experts in memory; ours are two."""
    named = {}
    for name, tensor in state.items():
        experts, _, own = name.rpartition(".")
        if own == "gate_up_proj":
            named[f"{experts}.gate_proj.weight"], named[f"{experts}.up_proj.weight"] = tensor.chunk(2, dim=1)
        else:
            named[name + ".weight" if experts.endswith(".experts") else name] = tensor
    return named


def unpadded(name, tensor, arch):
    return tensor[: arch.vocab_size] if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor


def our_model(model):
    """The same weights in a Decoder; padded rows hold garbage on purpose: they must not matter.
    As the model it is compared with, in evaluation: nothing is dropped."""
    arch = architecture_from_hf(model.config.to_dict())
    decoder = Decoder(arch).to(model.dtype)
    weights = canonical(model.state_dict(), arch)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.fill_(7.0)
            unpadded(name, parameter, arch).copy_(weights.pop(name))
    assert not weights
    return decoder.eval()


def batch(vocab_size, batch_size=3, length=17):
    """Ids, and targets shifted once with an uneven mask."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(vocab_size, (batch_size, length + 1), generator=generator)
    ids[0, 1] = (
        0  # the padding token, read and predicted: transformers gives its embedding no gradient where it is read
    )
    targets = ids[:, 1:].clone()
    targets[0, 3:9] = -100
    targets[2:] = -100
    return ids[:, :-1], targets
