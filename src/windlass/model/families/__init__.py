"""Model families: the fields of their config.json, and what they mean for the decoder.

family_table  every family by its model_type
family        what a family's fields have in common
rope_scaling  rope scaling: linear, dynamic, Llama 3.1, YaRN
presets       sizes by name

Inside:

llama_like    Llama, Mistral, Qwen2, Qwen3, SmolLM3
gpt2          GPT-2
qwen3_moe     Qwen3-MoE
"""
