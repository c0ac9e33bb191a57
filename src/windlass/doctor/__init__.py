"""What is wrong with a machine, before a run meets it. No torch.

diagnosis    one bad thing: its name, what was found, the rule, the fix
gpus         drivers, links, memory errors, clocks, other processes: what NVML says
host         this host without its GPUs: shared memory, limits, the environment
network      how this host reaches the others of a run
run_storage  the run directory: space, speed, locks, clock
"""
