"""What each command of the command line calls.

    before a run    recipes/, doctor, prepare_parts, data_inspect, data_lint, smoke
    starting one    launch/ (`train`, `prepare` and `verify` call their own rooms)
    beside one      status, profile, stacks, report, speed/
    after it        models/, checkpoints, reshard, data_consumed

launch/        `windlass launch`: a run on a cluster, a file for each kind
speed/         `windlass advise` and `bench`: how fast a run is, and why
recipes/       `windlass init` and `import`: where a recipe comes from
models/        `windlass evaluate`, `generate` and `export`: what is done with a model that is there

smoke          the whole life of a run at full size in 5 steps (`train --smoke`)
checkpoints    `windlass checkpoint list, verify, diff, prune`
reshard        a checkpoint rewritten in the files of another layout
report         `windlass report`: the page of a run
stacks         `windlass stacks`: where every rank on this host is
profile        `windlass profile`: where the time of a step goes, of a run that goes on
status         `windlass status`: running, finished, stopped, failed or dead
doctor         `windlass doctor`: what is wrong with a machine, and with a recipe on it
data_inspect   `windlass data inspect` and `windlass data report`
data_lint      `windlass data lint`
data_consumed  `windlass data consumed`: which samples a run has consumed
prepare_parts  `windlass prepare --part` and `--tokenizer-only`: a preparation on several machines
"""
