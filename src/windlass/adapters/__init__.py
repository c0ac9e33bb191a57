"""Adapters as settings and files; the layer that carries the factors is model/lora.

config       the adapter section of a recipe
peft_config  which PEFT adapters can be read, and what of a recipe they decide
peft_format  an adapter's files, in and out, as PEFT has them

Inside:

modules_to_save  what these files hold whole
"""
