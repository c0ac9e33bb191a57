"""Micro-batch, recomputation and compile, where the recipe leaves them open.

choose_sizes   by the checkpoint's choice, or by what fits
probe          one size tried for real: a step of a copy of the model, on every rank for itself
"""
