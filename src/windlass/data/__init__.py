"""Text in, one exact stream of token samples out.

config      what a recipe may say about data (no torch)
sources     files, globs, JSON lines and the embedded corpus -> documents
tokenizer   train a byte-level BPE or load a tokenizer; the bytes each token stands for
encode      documents -> token ids, in a pool of processes with bounded memory
packing     token ids -> samples of T+1 ids, nothing lost
mds         the shard format: writer, verified reader
prepared    what a preparation leaves on disk, and how it is recognised
place       a directory that changes hands whole: lock, temporary sibling, swap
prepare     the way from sources to shards, once
baselines   what a model must beat: unigram, bigram, gzip, bz2, xz
order       which sample stands where in the endless stream, by arithmetic
loader      global batches of that stream, one prefetch thread
evaluation  the same first samples of a set for every layout, with their exact bytes
"""
