"""Watches the ranks of a run from outside: where each one is, and which one stalls. No torch.

heartbeat    a page of shared memory per rank: step, phase, position in the stream
rank_stacks  the Python line and the last collective of every rank on this host
incident     what happened to a run, in a sentence and for events.jsonl
watchdog     which ranks stall, by deadlines that are learned from the run
beside       a watchdog as a process, for ranks that another launcher started
across_hosts what the watchdogs of several hosts see, put together
host_faults  what went wrong on this host since ranks were started
resident     host memory that ranks hold, and kills for want of it
gpu_health   what NVML says of this host's GPUs, and what of it is new
kernel_log   the NVIDIA driver's faults in the kernel's log
"""
