"""The Hugging Face hub.

client  commits, downloads and local copies of hub repositories
config  the recipe's `hub` section

Inside:

errors  what to tell the user when the hub refuses or fails
"""
