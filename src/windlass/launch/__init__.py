"""Starts ranks.

local     ranks on this machine, started again where one failed
restarts  whether ranks that failed are started again
config    the recipe's launch block

Inside:
agent     one start of the ranks, under torchelastic
"""
