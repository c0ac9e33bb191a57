"""What `windlass launch` calls, a file for each kind of cluster. `launch nodes` calls launch/nodes.py itself.

slurm       a run as jobs of a SLURM cluster
kubernetes  a run as pods
flyte       a run as a Flyte pipeline
sky         a run on hosts that SkyPilot rents

Inside:

submitted   what every kind of cluster asks of a recipe
"""
