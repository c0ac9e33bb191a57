"""Which documents of a source are worth learning: filters, which look at one document alone, and near-duplicates.

config         the filters of a source, and duplicates, in a recipe
filters        the table of filters, applied in its order; each document that is removed is counted by the filter that removed it
language       the language of a text, and by which version of a library it is found
near_duplicates  documents nearly the same as an earlier one, by MinHash

Inside:

decontaminate  whether a text shares an n-gram with texts that must not be learned
"""
