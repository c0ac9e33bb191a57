"""Starts ranks.

local  ranks on this machine, under torchelastic
"""
