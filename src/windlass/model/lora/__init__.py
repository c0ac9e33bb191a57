"""Low-rank factors beside the matrices of a model (LoRA), and a base in four bits (QLoRA).

adapter  which matrices carry factors, which are in NF4, what is trained: names and shapes (no torch)
linear   the linear layer of every block, with factors where an adapter asks for them
nf4      a frozen matrix as codes and scales
"""
