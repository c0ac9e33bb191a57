"""What a run is made of, each part made by its own file; assemble calls them in order.

open_data         the training stream and the validation sets, cut over the batch axes
open_program      the model laid out over the ranks, and its optimizer
open_checkpoints  the checkpoints of a run and their mirror
open_recorder     the console and the metrics of a run
device_memory     what of a device's memory may be used, and what fills it, by kind
own_parts         what a script brings in place of ours: an objective, a source, a schedule, a family, sinks
reference_scores  scores of pairs under the model that a preference run began with: read, or computed before step 0
"""
