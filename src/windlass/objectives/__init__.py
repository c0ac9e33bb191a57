"""What a step optimises, and over how many targets it is averaged.

config    the objective section of a recipe
pretrain  next-token prediction: every counted target weighs the same
"""
