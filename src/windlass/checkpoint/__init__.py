"""Checkpoints that cannot be lost or silently wrong.

    every rank: staging -> save -> hashed_file -> commit (draft, rename) -> keep, mirror
                                  MANIFEST and index <-'
    reading:    verify -> index -> stream -> restore (any layout)
                                        '-> reshard (files of another layout)

config          the recipe's `checkpoint` section
checkpoints     `Checkpoints`: save, wait, restore; what the trainer calls
restore         the newest whole checkpoint, or the one at a path, into any layout
commit          the commit protocol on a POSIX file system: draft, rename, quarantine, sweep (no torch)
manifest        MANIFEST, and the names of files and directories
verify          decides whether a checkpoint is whole: every byte against its MANIFEST (no torch)
index           which tensors a checkpoint holds, and where their bytes are (no torch)
keep            which checkpoints stay; list, diff and prune for the command line (no torch)
sealed_json     strict JSON that hashes itself
grid            boxes of a tensor, and which ranks hold them, in a few numbers for any number of ranks (no torch)
reshard         moves the bytes into the files of another layout (no torch)
provenance      which code, packages and hosts made a checkpoint
mirror          copies of checkpoints in an object store, and back (no torch)
shared_storage  finds storage that the ranks do not share

Inside:

save            plan, write, commit, with one verdict for all ranks
hashed_file     a file hashed as it is written, and verified piece by piece as it is read
stream          a box of a saved tensor, block by block, out of whichever files hold it (no torch)
staging         a rank's shards, and copies of them that training cannot reach
exchange        one verdict for all ranks: work that fails on one fails on all, with the same error
"""
