"""Starting ranks: on this machine (local, torchelastic) and as a pool that serves many small cases (ranks)."""
