"""Token ids on disk or at a URL, verified as they are read.

mds          the shard format: writer and verified reader
shard_format the bytes of one shard file, from its samples
index        index.json, checked; hashes; compressed shards
small_files  tokenizer and index files of a preparation, known by their hashes
config       the recipe's `data.cache`
cache        a bounded local cache of shards, shared by ranks and jobs
remote       a preparation at a URL: published whole, read through the cache
journal      which shards of a growing set are complete
growing      a reader's view of a set that is still being written

Inside:

columns      which columns a shard stores, and a sample's bytes
"""
