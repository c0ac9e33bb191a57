"""Where a recipe comes from: `windlass init` and `windlass import`.

    init:    first_rows, split_folder, row_lengths -> written_recipe -> new_recipe
    import:  foreign_files, torchtune_file -> foreign_facts -> import_recipe -> imported_recipe -> new_recipe

new_recipe      a recipe from a few answers, or from another tool's file, written where none was

Inside:

first_rows      what the first rows of a file are, and how many differ
split_folder    train*, validation* and test* files of one folder
written_recipe  the text of a new one
row_lengths     how long conversations are, and what sequences hold them
import_recipe   facts and keys of another tool -> a recipe, and what it has not
imported_recipe that recipe and its comments, as text
foreign_files   files of axolotl and LLaMA-Factory, read into facts
factory_sets    data sets as LLaMA-Factory's dataset_info.json describes them
factory_v1_file files of LLaMA-Factory's v1 trainer, in the words of its first
shared_keys     what those two take over from transformers
torchtune_file  files of torchtune, likewise
row_borders     whether rows that share a sequence see each other, by tool
foreign_facts   what several keys of another tool's file say together
"""
