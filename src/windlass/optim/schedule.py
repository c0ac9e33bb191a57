"""The learning rate as a function of the step: a pure function, so resume needs no scheduler state.

With W warm-up steps, N steps, peak L, floor f, for the update number s = step + 1 (1-based, so no update is made at 0):

    s <= W     L s / W
    cosine     L (f + (1 - f) (1 + cos(pi p)) / 2),  p = (s - W) / (N - W)
    wsd        L until N - D with D = decay_fraction N, then L (1 - (1 - f) (s - (N - D)) / D)
    linear     L (1 - (1 - f) p)
    constant   L

Past the end s is clamped to N: a cosine that is not clamped rises again and undoes the training (seen in the field).
Sources: SGDR, Loshchilov & Hutter, arXiv 1608.03983; WSD, Hu et al., arXiv 2404.06395.
"""

import math

from windlass.optim.config import OptimConfig


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """The rate of the update that completes step `step` + 1. `step` counts completed updates, 0-based."""
    update = min(step + 1, total_steps)
    peak, warmup, floor = config.learning_rate, config.warmup_steps, config.floor
    assert warmup != "auto"  # a number since the run's length is known
    if update <= warmup:
        return peak * update / warmup
    if config.schedule == "constant":
        return peak
    if config.schedule == "wsd":
        decay = config.decay_steps(total_steps)
        progress = max(0.0, (update - (total_steps - decay)) / decay)
        return peak * (1 - (1 - floor) * progress)
    progress = (update - warmup) / max(1, total_steps - warmup)
    if config.schedule == "linear":
        return peak * (1 - (1 - floor) * progress)
    return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)
