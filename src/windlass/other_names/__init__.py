"""Other tools' names for our settings, and words that are nearly ours: a recipe that has one is refused with what to write.
No torch.

answers       every such key, section and value of a recipe, with the error to raise
renamed_keys  words that their name alone keeps from being ours: `lr`, `output_dir`, `tensor`
table         the rows: section, words, tool, what to write
values        values of other tools for a key of ours: what to write, and what is not in this version
target_names  the matrices that other tools' `target_modules` means

Inside:

without_key   words that no single section answers, and what is not in this version
spellings     a sharding or a precision in any tool's spelling
"""
