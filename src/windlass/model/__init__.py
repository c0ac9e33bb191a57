"""One decoder for every family, with Hugging Face parameter names.

architecture  what the decoder needs to know, in neutral names; parameter shapes (no torch)
family        what every family's config has, and which fields are refused (no torch)
rotary        the fields that the families with rotary positions share, to an Architecture and back (no torch)
families      the families by name, and what each has besides (no torch)
gpt2          gpt2's fields (no torch)
qwen3_moe     qwen3_moe's fields (no torch)
scaling       stretched rotary positions: numbers and spellings (no torch)
config        the recipe's `model:` section; config.json in (no torch)
presets       named Hugging Face configs (no torch)
flops         parameters and FLOPs per token (no torch)
transformer   the decoder
activation    activation functions by name
moe           mixtures of experts
routing       the routers' load-balancing loss, and the experts' loads
rope          the tables of the rotary positions, and the turn
attention     the seam `attend(q, k, v, layout)`
attention_causal     rows of one document: torch's kernels
attention_documents  rows of several documents, and padding
attention_context    rows that ranks share: keys gathered, or positions exchanged for heads
attention_unfused    with dropout inside: an explicit softmax in pieces
kernels       which attention kernel runs
dropout       masks as a function of (seed, sample, place, element)
cache         keys and values kept for generation
loss          head and cross-entropy in chunks of tokens
slices        which part of a logical tensor this rank holds
init          initial weights as a function of (seed, name, element)
names         canonical names to Hugging Face's tensors and back (no torch)
weight_files  the safetensors files of a directory, and a head that lies there although it is tied (no torch)
hf            weights in from a Hugging Face directory, and out to one
"""
