"""Starts ranks.

    one host:       local -> agent -> spawn -> ranks
    several hosts:  nodes -> rendezvous -> agent -> elastic -> ranks, on each host
    a cluster:      slurm, kubernetes, flyte, sky write what it takes, and submit it
    a rank failed:  restarts decides

local       ranks on this machine, watched, and started again where one failed
nodes       ranks on several hosts: an agent on each
restarts    whether ranks that failed are started again
slurm       batch scripts for SLURM, and how they are submitted
kubernetes  manifests of a JobSet or a TrainJob
flyte       the file of a Flyte pipeline, and what is refused before it is submitted
sky         the task of a managed job of SkyPilot
job_names   the name of a job, as every cluster takes it
config      the recipe's launch block

Inside:

agent       one start of the ranks of this machine, watched, and how they failed
spawn       starts the processes of ranks on one host, without torch
elastic     their processes on one of several hosts, under torchelastic
rendezvous  where the agents of several hosts meet, leave and come again
slurm_config  the part of the launch block for jobs of SLURM
volume      whether a directory is where all pods see it
"""
