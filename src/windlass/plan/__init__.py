"""What a run will need, counted from its recipe before it begins. No torch.

memory   bytes of one rank's device, by kind
sizes    micro-batch and recomputation by what fits into a device: what is tried, in which order
zero     how much ZeRO cuts: the least with which a step fits
"""
