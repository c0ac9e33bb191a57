"""The Hugging Face hub.

client  commits, downloads and local copies of hub repositories
config  the recipe's `hub` section
push    an exported directory into a repository

Inside:

errors  the messages for a hub that refuses or fails
"""
