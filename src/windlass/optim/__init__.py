"""How weights move: the optimizer, the clip of its gradient, the learning rate over time.

config    what a recipe may set (no torch)
adamw     parameter groups by record, AdamW, its state as named tensors
clip      the global gradient norm over all shards, and the factor
schedule  the learning rate of a step (no torch)
"""
