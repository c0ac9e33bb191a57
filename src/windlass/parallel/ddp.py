"""DDP: every rank keeps the whole model; gradients are summed by one all-reduce per bucket, while backward still runs.

The picture: rank r computes g_r from its part of the batch; after backward every rank holds sum_r g_r.

    kept per rank    P parameters, P gradients, 2P optimizer states (AdamW): 16 P bytes in fp32
    sent per step    buckets all-reduces of P x 4 bytes together; a ring moves 2 (N-1)/N of that per rank (reduce-scatter,
                     then all-gather). `num_buckets` counts them; accumulation adds none (no_sync on all but the last
                     micro-batch).

Why the gradient is right: the differentiated loss is (sum over this rank's targets) / (count over all ranks), so a plain sum
over ranks is the gradient of the global mean. torch's DDP divides by the world size instead (a mean of means); the hook below
replaces that. Without no_sync a gradient that was already summed would be summed again: wrong by a factor, not just slow.

Source: Li et al., PyTorch Distributed, arXiv 2006.15704.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from windlass.parallel.mesh import Mesh

BUCKET_MIB = 25  # torch's default; its first bucket is 1 MiB, so that the first all-reduce starts early


def _sum_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum without dividing. DDP checks that the argument is called `bucket`."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def apply_ddp(model: nn.Module, mesh: Mesh, device: torch.device) -> nn.Module:
    """The module to call in place of `model`; `model` itself on one rank. Parameter names stay those of `model`."""
    group = mesh.dense["replicate"].get_group()
    if group.size() == 1:
        return model
    device_ids = [device] if device.type == "cuda" else None
    wrapper = DistributedDataParallel(
        model, device_ids=device_ids, process_group=group, bucket_cap_mb=BUCKET_MIB, gradient_as_bucket_view=True
    )
    wrapper.register_comm_hook(group, _sum_bucket)
    return wrapper
