"""Text in, one exact stream of token samples out.

config      what a recipe may say about data (no torch)
source_config  what a recipe may say about one source (no torch)
order_config  what a recipe may say about the order of the first epoch (no torch)
sources     files, globs, JSON lines and the embedded corpus -> documents
formats     the file formats of a source: bytes in, texts out
kinds       whether a source's files are of the kinds that its settings speak of
hub_rows    rows of a dataset of the Hugging Face hub, or of a local one
fetch       what is not on this host, brought here once
arriving    a directory that is still being filled, file by file
selection   which documents a set holds, without duplicates where asked
tokenizer   train a byte-level BPE or load a tokenizer; the bytes each token stands for
end_of_text  which token ends a document, wherever the files of a tokenizer say it
fast_bpe    the same ids by tiktoken, or not at all
encode      documents -> token ids, in a pool of processes with bounded memory
parts       what tokenisation has done so far: a killed preparation goes on
writing     one set: documents -> ids -> samples -> shards
messages    rows of chat: conversations, and what is none
chat        conversations by the tokenizer's template -> ids, and which of them are learned
packing     token ids -> samples of T+1 ids, nothing lost
pairs       preferences: two answers to one prompt -> ids, a pair a sample
mds         the shard format: writer, verified reader
shards      index.json, checked; hashes; compressed shards
store       whole files of any URL, through fsspec, within a deadline
url_errors  what a URL's file system raised, as what is wrong
cache       a bounded local cache of shards, shared by ranks and jobs
remote      a preparation at a URL: published whole, read through the cache
small_files  tokenizer and indices of a preparation, known by their hashes
prepared    what a preparation leaves on disk, and how it is recognised
place       a directory that changes hands whole: lock, temporary sibling, swap
prepare     the way from sources to shards, once
plan        what is to be prepared: every source looked at, documents chosen
making      a preparation made, whole or growing in place
journal     which shards of a growing set are whole, told in a file
growing     those shards as a reader sees them, and waits for them
arrival     the stream whose first epoch is the written order, and the proof of what was read
background  prepare in a process of its own, while training runs
baselines   what a model must beat: unigram, bigram, gzip, bz2, xz
order       which sample stands where in the endless stream, by arithmetic
mixture     several sources in fixed shares, by arithmetic too
ledger      from a run's events to the very samples it consumed
loader      global batches of that stream, one prefetch thread
skip        bad shards that a run leaves out, by agreement of all ranks
walk        samples as they lie, and the documents in them: for those who look
inspect     what is in a set, in numbers and as a sample to read
lint        what is wrong with a set, by the checks below
findings    what lint can find: codes, how grave, what to change
lint_ids    checks on ids and labels: masks, borders, vocabulary, copies
lint_pairs  checks on preferences
lint_text   checks on the text of documents
lint_tokenizer  checks on the tokenizer of a preparation
evaluation  the same first samples of a set for every layout, with their exact bytes
"""
