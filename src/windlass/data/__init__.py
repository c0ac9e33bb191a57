"""Text in, one exact stream of token samples out.

    sources -> tokenize -> prepare -> shards -> stream -> the loop
          tokens ----------^               \\-> lint

sources    where text comes from: files, URLs, the hub, directories that still grow
curate     which documents are worth learning
tokenize   text -> token ids, in a pool of processes
tokens     files of token ids that another tool made, as a source
prepare    sources -> shards, once; what is unchanged is not prepared again
shards     token ids on disk or at a URL, verified as they are read
stream     shards -> batches, in an order that is a function of (seed, samples consumed)
lint       what is in prepared data, and what is wrong with it

config         the recipe's `data` section
batch_fields   what a batch holds, and the label of a target that is not counted
held_out       an amount of the documents for validation, in a recipe
files          durable files, and the packages that read URLs
packing        token ids -> samples of T+1 ids, nothing lost; masks targets across the borders of documents
verified_file  a file that is read in any order, and is the one that was hashed

Inside:

tokenizer_config  the tokenizer, in a recipe
"""
