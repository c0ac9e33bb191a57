"""What a step optimises, and over how many targets or pairs it is averaged.

config      the objective section of a recipe
objective   what the loop knows of an objective, and which one a recipe asks for
kept_scores scores of the model that a preference run began with, computed once and kept

Inside:

pretrain    next-token prediction: every counted target once
preference  two answers to a prompt: DPO and its relatives, as weights per row
"""
