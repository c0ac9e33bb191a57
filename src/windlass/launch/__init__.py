"""Starting ranks.

local  ranks on this machine, under torchelastic
ranks  a pool of gloo ranks that serves many small cases per start
"""
