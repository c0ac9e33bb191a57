"""What the tasks of a Flyte 2 pipeline call. Needs the `flyte` extra; nothing else of windlass imports this room.

tasks  prepare, train and the cache's key: the bodies of a pipeline's tasks
ranks  Flyte's Elastic, with errors that no retry fixes

Inside:

page   the live report: when it is made again, and the page
"""
