"""A training run from recipe to last checkpoint.

    loop.train -> preflight -> resolve -> assemble -> loop.loop: step, step, step
                      |           |          '-> run: what happens between steps
                   start/      sizing/ and parts/, which know nothing of the files here

start/            what a run starts from: hub names, the model and its base, a checkpoint
parts/            what a run is made of: data, program, recorder, and what a script brings of its own
sizing/           micro-batch, recomputation and compile, where the recipe leaves them open; what fills a device

config            the run section of a recipe
loop              the loop
assemble          Run: program, optimizer, checkpoints, stream, made in one place of what is resolved
preflight         refuses what can be refused before anything slow happens; then downloads and prepares data, once
interruptible     work before the first step, which a signal ends at once
run_directory     makes and locks the run directory
left_open         resolves what a recipe leaves open: steps, warm-up, `precision.policy: auto`

Inside:

run               the parts of a run, and what happens between steps: validate, record, close
saving            when a checkpoint is due, what it holds, and what the log says of it
health            whether a run still learns: skipped steps, norms far from the usual, updates that round to nothing
resolve           recipe, checkpoint, data and devices -> what is trained, with nothing left open
memory_advice     what to say where a step has run out of memory
watch_ranks       where ranks say what they do, and the process that looks after them
run_facts         what `windlass advise` needs to know of a run besides its settings
announce          prints what was derived before step 1 and writes resolved.yaml
"""
