"""Where the work lies: which rank holds which part of the model and of the batch, and what is sent when.

config      the layout a recipe asks for, and what a world of ranks makes of it (no torch)
mesh        the ranks as a grid with named axes, and the groups that sums run over
ddp         replicas with one all-reduce per bucket
fsdp        ZeRO-2, ZeRO-3 and HSDP: parameters, gradients and states cut over ranks
recompute   activations thrown away and computed again
precision   which dtype computes, which reduces, which is stored
census      what must hold after the techniques were applied, counted
program     the one door: forward and backward of a global batch, whatever the layout
build       the techniques, applied in their one order
"""
