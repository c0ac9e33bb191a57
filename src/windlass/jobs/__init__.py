"""What needs several rooms at once.

train      the loop
ready      what can be refused before anything slow happens; then downloads and data, once
pins       hub names of a recipe, pinned to commits
assemble   a recipe resolved against its files and devices: everything a job works with, made in one place
base       what a run keeps of the model that it began from, in every checkpoint
announce   what was derived, told before step 1 and written beside the run
layout     the run's layout in one line
trainable  which parameters are trained, and how
recompute  what the blocks recompute, by the recipe's word or within a budget
run        the assembled parts of a training run: validate, save, close
health     whether a run still learns: skipped steps, updates that round to nothing
directory  the run directory, made and locked
drift      what differs between a checkpoint and the run that would continue it
restore    where a run continues: newest checkpoint, another run's, or step 0; drift named before step 1
arrival    what a run tells of data that is still prepared, and how a resume knows it again
skips      what a run may leave out of its data, and how its ranks agree on it
objective  what a step optimises, and over how many targets it is averaged
evaluate   validation of a checkpoint
lint       what is wrong with the data: `data lint`, and before step 0
inspect    what is in the data: `data inspect`
consumed   which samples a run has consumed: `data consumed`
checkpoints  what `windlass checkpoint` prints
reshard    a checkpoint in the files of another layout: which rank holds what
generate   text from a checkpoint or an exported directory
export     a checkpoint as a Hugging Face directory, reloaded and compared
card       the model card of an export
rehearse   a run's whole life at full size in 5 steps (`train --smoke`)
saved      a model on disk, read back: a run, one checkpoint, a Hugging Face directory
reference  the same training in torch and transformers alone: the oracle of the proofs
verify     the recipe's layout, proved equal to one process on a tiny twin
fold       a layout folded to the ranks at hand
twin       a recipe in small, with everything that can make a layout wrong
proof      what ranks do for a proof: the real training, watched
truth      what a proof holds them against: rows, model and training of one process
differences  a layout's training against that of one process, number by number
"""
