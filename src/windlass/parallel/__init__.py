"""Which rank holds which part of the model and the batch, and what is sent when.

rules/          which layouts are possible (no torch)

config          the recipe's `parallel` section, and the mesh it makes of a world of ranks (no torch)
mesh            the ranks as a grid with named axes, and the groups that sums run over
program         the one door: forward and backward of a global batch, whatever the layout
records         what optimizer, clip and checkpoint know of a parameter
build           applies the techniques below, in their one order
stages          where a pipeline cuts the model
activations     how many bytes the blocks keep, and which of them recompute within a budget
invariants      what must hold once the techniques are applied: units, dtypes, a gradient for every parameter
runtime_checks  compares the ranks while a layout runs: what several hold, before every save; batches, with `parallel.check`

Inside:

ddp             replicas with one all-reduce per bucket
fsdp            ZeRO-1 to 3 and HSDP: parameters, gradients and states cut over ranks
cut             parameters cut over `tp` ranks, and how the stream is gathered and scattered
tensor          every matrix cut over `tp` ranks, and the residual stream with it
context         ranks share each row of tokens
expert          experts dealt out over ranks; tokens travel to them and back
pipeline        stages on ranks; micro-batches flow through them
tie             a tied embedding whose two ends are on two stages
recompute       activations dropped and computed again
routers         the gradient of the routers' loss, and the figures reported of it
"""
