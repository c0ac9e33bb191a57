"""Published bugs of other frameworks, as patches of our source: `windlass verify` must see each."""
