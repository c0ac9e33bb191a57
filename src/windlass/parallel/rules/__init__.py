"""Which layouts are possible: rules that need no torch.

degrees           degrees of tensor and context parallelism against the model's shape
expert            degrees of expert parallelism
names_of_layouts  other tools' names of layouts, answered with ours
"""
