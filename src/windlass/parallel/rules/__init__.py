"""Which layouts are possible. No torch: recipes are checked before it is imported.

check_layout  the one call that checks all rules below, and lists every violation
pipeline      stages, schedules and their micro-batches
schedules     in which order a pipeline's ranks run their micro-batches, and who holds which stage
batch         the global batch in micro-batches
budget        the least that a budget of activations must hold

Inside:

degrees       tensor and context parallelism against the model's shape and the sequence length
expert        expert parallelism, and what experts forbid
effects       settings that contradict each other or change nothing
"""
