"""Sources -> shards, once.

    prepare -> plan -> build -> choose_documents, write_set -> chunked_sets, shards_of_workers -> directory (swapped in whole)
                   '-> appended, part, background: of a mixture that grows, one of several machines, during training

prepare      opens a finished preparation or makes one
manifest     prepared.json: what a preparation holds
background   prepares in a process of its own while training runs
part         one of several machines' parts of a preparation
part_record  parts on disk, and which of them are joined

Inside:

fingerprint  what a preparation is recognised by
plan         scans every source
choose_documents  the documents of every set, fetched and counted
hold_out     an amount of the documents for validation
build        writes the sets of a preparation, whole or growing in place
write_set    one set: documents -> ids -> samples -> shards
chunked_sets the sources that workers read themselves, in chunks
chunk_tasks  what a worker does with a chunk
shard_tasks  what a worker does with a shard: ranges of encoded texts, joined
shards_of_workers  the shards of texts that are concatenated, written by those workers
appended     a source appended to a mixture: the shards of the others stay
counted_set  counts a set while it is written, and prints the progress
directory    a directory that is replaced as a whole: lock, temporary sibling, swap
baselines    what a model must beat: unigram, bigram, gzip, bzip2, xz
"""
