"""A profile of a few steps of a run that goes on: `windlass profile RUN`.

recorder  in the rank: torch's trace and the collectives of the steps that somebody asked for, written into the run directory
summary   the trace -> where a step's time goes, by kind of operator and by axis of the layout; no torch

Inside:

counts     operators and blocking reads of one step of every run
intervals  spans of time: their union, and what is left of one without another
"""
