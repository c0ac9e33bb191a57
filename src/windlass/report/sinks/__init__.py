"""Sinks: TensorBoard, Weights & Biases and Trackio beside a run.

A process of its own follows events.jsonl and sends new lines, so that no step waits for a disk, a network or another library.

sync    `windlass sync RUN`: sends what a run has logged, once or as it grows
start   the process that follows a run that trains, and threads for sinks of a script
follow  which lines of a run go to a sink, and how many of them have gone
sink    what a sink is: three calls

Inside:

to_tensorboard  event files in the run directory
to_wandb        a run of W&B with the run's own id, online or offline
to_trackio      a run in the local database of Trackio
"""
