"""Model families: the fields of their config.json, and what they mean for the decoder.

family_table  every family by its model_type
family        what a family's fields have in common
rope_scaling  rope scaling: linear, dynamic, Llama 3.1, YaRN
presets       sizes by name

Inside:

llama_like    what families with rotary positions share; Llama, Mistral, Qwen2, Qwen3, SmolLM3 are nearly that

GPT-2's block

gpt2          GPT-2
starcoder2    StarCoder2: rotary positions, grouped heads

Mixtures of experts

qwen3_moe     Qwen3-MoE
mixtral       Mixtral

Llama's block with more

granite       Granite: constant factors
phi3          Phi-3, Phi-4: fused files
ernie         ERNIE 4.5: neighbouring channels rotate

Other places for norms

olmo          OLMo 2, OLMo 3: behind attention and MLP
exaone4       EXAONE 4: the same, and layers without positions
gemma         Gemma 2, Gemma 3: before and behind
glm4          GLM-4: the same
cohere2       Command R7B, Command A: attention and MLP side by side
"""
