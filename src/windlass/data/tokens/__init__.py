"""Files of token ids that another tool made, as a source of documents.

    MDS: index.json, shard.00000.mds, ...    a row is an array of ids in one column
    Megatron: x.idx, x.bin                   the index has every document's offset
    raw: x.bin                               ids alone (nanoGPT), or behind a header (llm.c)
          |
        rows  --- each id checked against the vocabulary --->  documents, cut at EOS  --->  parts  --->  prepare
                                                               or rows as they are stored

token_files  a recipe's source -> its files, hashed once
documents    files -> documents or rows of ids
token_parts  documents of ids -> what `prepare` packs, or samples of one row each

Inside:

mosaic_mds  rows of MosaicML's format as others write it, of any integer, with no hash or some
megatron    documents of Megatron-LM's indexed datasets
raw_ids     ids without rows
stored_row  one row, and where it was found
"""
