"""How weights move: the optimizer, the clip of its gradient, the learning rate over time.

config    what a recipe may set (no torch)
rules     which of `optim.groups` decides for a parameter, by name (no torch)
groups    parameter groups by record: rate, decay, mesh
adamw     AdamW, its state as named tensors
elementwise the update tensor by tensor, in any dtype
rounding  stochastic rounding by counter
muon      orthogonalised momentum for the matrices of the blocks, AdamW for the rest
optimizer the door: the optimizer that a recipe names
clip      the global gradient norm over all shards, and the factor
schedule  the learning rate of a step (no torch)
"""
