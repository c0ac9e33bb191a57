"""How weights move: the optimizer, the clip of its gradient, the learning rate over time.

config       the recipe's `optim` section (no torch)
optimizer    the optimizer that a recipe names; what the trainer calls
elementwise  the update tensor by tensor, in any dtype
rules        which of `optim.groups` decides for a parameter, by name (no torch)
groups       parameter groups by record: rate, decay, mesh
clip         the global gradient norm over all shards, and what an update divides by
schedule     the learning rate of a step (no torch)

Inside:

adamw        AdamW, its state as named tensors
muon         orthogonalised momentum for the matrices of the blocks, AdamW for the rest
rounding     stochastic rounding by counter
"""
