"""One decoder for every family, with Hugging Face parameter names.

attention/    `attend(q, k, v, layout)`: every kernel behind one function
head/         the head, and the loss of targets in chunks of tokens
lora/         the linear layer, with low-rank factors and a base in four bits
families/     the fields of each family's config.json; a file per family

config        the recipe's `model` section, and the fields of a config.json (no torch)
open_config   config.json of a directory, read, and its sizes compared with the weights (no torch)
architecture  what the decoder needs to know, in neutral names; parameter shapes (no torch)
names         our parameter names <-> Hugging Face's tensor names (no torch)
flops         parameters and FLOPs per token (no torch)
transformer   the decoder
layers        attention, the MLP, activations by name, and norms
moe           mixtures of experts
kernels       which attention kernel runs
dropout       masks as a function of (seed, sample, position, element)
chunks        how many logits and attention weights exist at a time (no torch)
cache         keys and values kept for generation
slices        which part of a logical tensor this rank holds
init          initial weights as a function of (seed, name, element)
weight_files  the safetensors files of a directory (no torch)
hf            weights in from a Hugging Face directory, and out to one

Inside:

routing       the routers' load-balancing loss, and the load of each expert
rope          rotary position tables, and the rotation
shard_writer  safetensors files whose tensors arrive one by one
"""
