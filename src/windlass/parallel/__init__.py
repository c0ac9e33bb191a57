"""Where the work lies: which rank holds which part of the model and of the batch, and what is sent when.

config      the layout a recipe asks for, and what a world of ranks makes of it (no torch)
names       what other tools call these settings, answered with ours (no torch)
mesh        the ranks as a grid with named axes, and the groups that sums run over
degrees     which sizes of `tp` and `context` a model allows (no torch)
ddp         replicas with one all-reduce per bucket
tensor      every matrix cut over `tp` ranks, and the residual stream with it
expert      experts dealt out over ranks, tokens that travel to them and back
expert_degrees  what experts allow of a layout and a recipe (no torch)
routers     what the routers' loss is differentiated by, and what is reported of them
context     ranks share each row of tokens: where it is cut
fsdp        ZeRO-1 to 3 and HSDP: parameters, gradients and states cut over ranks
stages      where a pipeline cuts the model
schedules   in which order a pipeline's ranks run their micro-batches (no torch)
pipeline    stages on ranks: micro-batches flow through them
tie         a tied embedding whose ends are two stages
recompute   activations thrown away and computed again
activations how many bytes the blocks keep, and which of them recompute within a budget
precision   which dtype computes, which reduces, which is stored
precision_names  what other tools call a precision, answered with our policy (no torch)
precision_config  what a recipe says of precision: the policies as a table (no torch)
scaler      the loss scale of fp16
census      what must hold after the techniques were applied, counted
check       what a layout takes for granted, looked at while it runs
records     what optimizer, clip and checkpoint may know of a parameter
program     the one door: forward and backward of a global batch, whatever the layout
build       the techniques, applied in their one order
"""
