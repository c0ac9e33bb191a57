"""Where text comes from: files, URLs, the Hugging Face hub, and directories that are still being filled.

config           one source in a recipe
scan             a recipe's source -> its files
source_files     what is known of a file, and the documents in files on this host
known_hashes     hashes of local files that are as they were, so that a start does not read them
hub              rows of a Hugging Face dataset, from the hub or a local copy
growing          a directory that is still being filled, file by file
chat_rows        rows that hold a conversation
preference_rows  rows that hold two answers to one prompt
fetch            copies what is not on this host, once
select           which documents a set keeps, without duplicates where asked
bad_rows         rows that are no document: named, counted, left out or refused
compression      compressed files, unpacked as they are read

Inside:

shape_config     the shape of documents: where a conversation is in a row; a middle that is moved
urls             files at URLs, and what is wrong where their file system fails
formats          file formats: bytes in, rows out; which files a source may hold
text_rows        rows as text: JSON lines, JSON, CSV
table_rows       rows as columns: Parquet, Arrow
row_shapes       conversations in rows of other names: sharegpt, alpaca, one's own
row_text         a row's text, in a key, a nested one, or several
"""
