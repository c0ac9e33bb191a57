"""Checkpoints that cannot be lost or silently wrong.

config      what the user sets: how often, how many, sync or async
sealed      strict JSON that hashes itself; which file names a checkpoint may hold
pieces      a file written and hashed in one pass, read back piece by verified piece
store       the commit protocol on a POSIX file system: draft, manifest, rename, verify, quarantine (no torch)
keep        which checkpoints stay; list, diff and prune for the command line (no torch)
storage     DCP's StorageWriter and StorageReader over the store: raw tensor bytes, no pickle
exchange    one verdict for all ranks: work that fails on one fails on all, with the same error
state       `Checkpoints`: save, wait, restore; what the trainer calls
provenance  which code, packages and hosts made a checkpoint
probe       finds storage that the ranks do not share
"""
