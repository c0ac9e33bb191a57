"""What ranks run for test_hf, apart from it: each rank imports this file, and transformers would cost it seconds."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from windlass.model.config import ModelConfig
from windlass.model.hf import load_weights, save_weights
from windlass.model.open_config import architecture_of
from windlass.model.transformer import Decoder


def load_sharded(path, out):
    """On each rank: FSDP2 shards filled from the directory; gathered, and exported by rank 0."""
    arch = architecture_of(ModelConfig(**{"from": path}))
    with torch.device("meta"):
        decoder = Decoder(arch)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for part in [*decoder.blocks, decoder]:
        fully_shard(part, mesh=mesh)
    decoder.to_empty(device="cpu")
    decoder.tie()
    for parameter in decoder.parameters():
        parameter.detach().to_local().fill_(torch.nan)
    load_weights(path, arch, dict(decoder.named_parameters()))
    rank = torch.distributed.get_rank()
    save_weights(out, arch, decoder.named_parameters(), torch.float32, write=rank == 0)
    return {name: parameter.full_tensor().detach() for name, parameter in decoder.named_parameters()}
