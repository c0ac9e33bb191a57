"""Where the time of a run goes and what to change next: `windlass advise RUN`. No torch.

facts     what a start writes of a run in numbers: ranks, FLOPs per token, how full the rows are
observed  a run's events and settings -> what its steps took
levers    what to change, each with its gain and where the gain is from
mfu       what a share of the peak means

Inside:

traffic   bytes and calls per step of every layout, by formula
"""
