"""Named models: the Hugging Face config of each, with true counts. No torch.

GPT-2's dropouts are 0 here (Hugging Face's configs carry 0.1): pretraining sees each token about once, and dropout is
not offered in training. `gpt2-1.3b`, `-26b`, `-65b` have the shapes of a known recipe that calls them 1.5B, 30B and
65B; the names here say what they really count.
"""

from typing import Any, Final

_GPT2: Final[dict[str, Any]] = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}

PRESETS: Final[dict[str, dict[str, Any]]] = {
    "gpt2-124m": {**_GPT2, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},  # 124,439,808
    "gpt2-1.3b": {**_GPT2, "n_embd": 2048, "n_layer": 24, "n_head": 16, "n_positions": 2048},
    "gpt2-26b": {**_GPT2, "n_embd": 6656, "n_layer": 48, "n_head": 52, "n_positions": 2048},
    "gpt2-65b": {**_GPT2, "n_embd": 8192, "n_layer": 80, "n_head": 64, "n_positions": 2048},
    "llama-2-13b": {  # meta-llama/Llama-2-13b-hf
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen3-4b": {  # Qwen/Qwen3-4B
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
}
