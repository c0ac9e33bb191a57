"""Shards -> batches, in an order that is a function of (seed, samples consumed).

open_stream      the door: prepared data and a recipe -> BatchSource, with the features that the recipe asks for
open_order       `Opening`, what a stream is opened with; which order a recipe asks for, and where it goes on after a resume
batch_source     BatchSource, what the loop reads from
config           the recipe's `data.order`, `data.stages` and `evaluate`
mixture_shares   which source has which position: shares that are exact, and may change along the stream
loader           global batches of an order, cut for this rank, read ahead by one thread
ledger           from a run's events to the samples that it consumed
evaluation_set   the same first samples of a set in every layout, with their exact bytes

Inside:

mixture          an order of several sources
lane_order       an order in lanes: each host reads shards of its own
mixture_lanes    several sources in lanes
order            which sample has which position of the endless stream
collate          samples -> tensors; isolated documents; keys for dropout
growing_stream   an order whose shards may still be written, and the source that logs and checkpoints it
skipping_stream  shards that cannot be read, left out by agreement of all ranks
"""
