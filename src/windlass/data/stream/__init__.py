"""Shards -> batches, in an order that is a function of (seed, samples consumed).

config          the recipe's `data.order`
order           which sample stands at which position of the endless stream
batch_source    what the loop reads from, whoever makes it
mixture         several sources in fixed shares
loader          global batches of the stream, read ahead by one thread
skip            damaged shards that a run leaves out, agreed on by all ranks
arrival         a first epoch in the order in which shards were written
ledger          from a run's events to the samples that it consumed
evaluation_set  the same first samples of a set in every layout, with their exact bytes
"""
