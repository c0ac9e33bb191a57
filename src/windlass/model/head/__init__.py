"""The head: hidden states -> logits, or the loss of targets without the logits of all tokens at once.

head            lm_head: logits, or the loss
loss            cross-entropy in chunks of tokens
source_losses   the loss of each source of a mixture

Inside:

one_pass        the loss of a chunk and its gradient as one function to compile
"""
