"""What needs several rooms at once.

train      the loop
assemble   a recipe resolved against its files and devices: everything a job works with, made in one place
run        the assembled parts of a training run: validate, save, close
restore    where a run continues: newest checkpoint, another run's, or step 0; drift named before step 1
objective  what a step optimises, and over how many targets it is averaged
evaluate   validation of a checkpoint
checkpoints  what `windlass checkpoint` prints
generate   text from a checkpoint or an exported directory
export     a checkpoint as a Hugging Face directory, reloaded and compared
rehearse   a run's whole life at full size in 5 steps (`train --smoke`)
saved      a model on disk, read back: a run, one checkpoint, a Hugging Face directory
reference  the same training in torch and transformers alone: the oracle of the proofs
"""
