"""Which layouts are possible. No torch: recipes are checked before it is imported.

check_layout      the one call that checks all rules below, and lists every violation
degrees           tensor and context parallelism against the model's shape and the sequence length
expert            expert parallelism
pipeline          stages, schedules and their micro-batches
batch             the global batch in micro-batches
effects           settings that contradict each other or change nothing
"""
