"""What a recipe leaves open: micro-batch, ZeRO, recomputation, compile, FlashAttention; and what to change where they do not fit.

choose_sizes   by the checkpoint's choice, or by what fits
choose_flash   the version of FlashAttention for rows of several documents, by what is installed and right
out_of_memory  what to change where a device has run out of memory, and what each change frees
compiled       compiled kernels whose threads race: looked at after the first step

Inside:

kept_choice    whether a run that goes on may take its checkpoint's sizes, and the reason where it may not
probe          one size tried for real: a step of a copy of the model, on every rank for itself
choose_zero    the stage of ZeRO among the choices; and a word where ranks on CPUs cut what fits whole
host_memory    what a host has left for its ranks (no torch)
"""
