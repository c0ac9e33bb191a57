"""Which documents of a source are worth learning, by filters that each look at one document alone.

config         the filters of a source, in a recipe
filters        the table of filters, applied in its order; each document that is removed is counted by the filter that removed it
language       the language of a text, and by which version of a library it is found

Inside:

decontaminate  whether a text shares an n-gram with texts that must not be learned
"""
