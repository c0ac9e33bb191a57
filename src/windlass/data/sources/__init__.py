"""Where text comes from: files, URLs, the Hugging Face hub, and directories that are still being filled.

config            one source in a recipe
scan              a recipe's source -> its files and rows
fetch             copies what is not on this host, once
growing           a directory that is still being filled, file by file
hub               rows of a Hugging Face dataset, from the hub or a local copy
urls              errors of a URL's file system, put in words
formats           file formats: bytes in, rows out
kinds             whether the files of a source fit its settings
chat_rows         rows that hold a conversation
preference_rows   rows that hold two answers to one prompt
select            which documents a set keeps, without duplicates where asked
"""
