"""What a step optimises, and over how many targets it is averaged.

pretrain  next-token prediction: every counted target weighs the same
"""
