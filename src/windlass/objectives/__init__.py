"""What a step optimises, and over how many targets it is averaged.

config    the objective section of a recipe
pretrain  next-token prediction: counts the targets that a step's loss is divided by
"""
