"""A training run from recipe to last checkpoint.

parts/            what a run is made of: data, program, recorder, and what a script brings of its own
sizing/           micro-batch, recomputation and compile, where the recipe leaves them open; what fills a device

config            the run section of a recipe
loop              the loop
assemble          Run: program, optimizer, checkpoints, stream, made in one place of what is resolved
preflight         refuses what can be refused before anything slow happens; then downloads and prepares data, once
model_plan        the model of a run: its shape, the rules of its parameters, what each layer recomputes
restore           where a run starts: its newest checkpoint, another run's, or step 0
open_saved        opens a run, a checkpoint, a Hugging Face directory or an adapter for reading
pins              hub names of a recipe, pinned to commits
parameter_rules   which parameters are trained, and how
base_model        the model that a run began from: what checkpoints keep of it, and whether a frozen base is the same
interruptible     work before the first step, which a signal ends at once
run_directory     makes and locks the run directory; its checkpoints
left_open         resolves what a recipe leaves open: steps, warm-up, `precision.policy: auto`

Inside:

run               the parts of a run, and what happens between steps: validate, save, close
drift             settings that differ between a checkpoint and the recipe that would continue it
health            whether a run still learns: skipped steps, norms far from the usual, updates that round to nothing
resolve           recipe, checkpoint, data and devices -> what is trained, with nothing left open
memory_advice     what to say where a step has run out of memory
announce          prints what was derived before step 1 and writes resolved.yaml
"""
