"""The Hugging Face hub.

client  commits, downloads and local copies of hub repositories
config  the recipe's `hub` section
errors  what a hub that refuses or fails means, in words
"""
