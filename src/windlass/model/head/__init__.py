"""The head: hidden states -> logits, or the loss of targets without the logits of all tokens at once.

loss      head and cross-entropy in chunks of tokens

Inside:

one_pass  the loss of a chunk and its gradient as one function to compile
"""
