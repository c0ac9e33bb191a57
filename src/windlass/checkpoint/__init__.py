"""Checkpoints that cannot be lost or silently wrong.

config      what the user sets: how often, how many, sync or async
sealed      strict JSON that hashes itself; which file names a checkpoint may hold
pieces      a file written and hashed in one pass, read back piece by verified piece
manifest    MANIFEST, and the names of files and directories
store       the commit protocol on a POSIX file system: draft, rename, quarantine, sweep (no torch)
verify      every byte of a checkpoint against its MANIFEST (no torch)
index       which tensors a checkpoint holds, and where their bytes lie (no torch)
keep        which checkpoints stay; list, diff and prune for the command line (no torch)
stream      a box of a saved tensor, block by block (no torch)
reshard     the bytes moved into the files of another layout (no torch)
storage     DCP's StorageWriter and StorageReader over the store: raw tensor bytes, no pickle
exchange    one verdict for all ranks: work that fails on one fails on all, with the same error
staging     a rank's shards, and copies of them that training cannot reach
save        plan, write, commit, with one verdict for all ranks
restore     the newest whole checkpoint, or the one at a path, into any layout
state       `Checkpoints`: save, wait, restore; what the trainer calls
provenance  which code, packages and hosts made a checkpoint
probe       finds storage that the ranks do not share
"""
