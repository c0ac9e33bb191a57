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
_QWEN25: Final[dict[str, Any]] = {
    "model_type": "qwen2",
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "use_sliding_window": False,
    "rope_theta": 1000000.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
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
    "llama-3.1-8b": {  # meta-llama/Llama-3.1-8B: 8,030,261,248
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "qwen2.5-1.5b": {  # Qwen/Qwen2.5-1.5B: 1,543,714,304
        **_QWEN25,
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {  # Qwen/Qwen2.5-7B: 7,615,616,512
        **_QWEN25,
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
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
    "smollm3-3b": {  # HuggingFaceTB/SmolLM3-3B-Base: 3,075,098,624
        "model_type": "smollm3",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 65536,
        "rope_theta": 5000000.0,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "pad_token_id": 128004,
    },
}
