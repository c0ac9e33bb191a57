"""Initial weights: the same in every layout, from meta, and with the rule's spreads."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from windlass.model.config import ModelConfig
from windlass.model.init import BLOCK, draw_block, initialise
from windlass.model.transformer import Decoder

SMALL = {"vocab_size": 211, "initializer_range": 0.05}
GPT2 = {**SMALL, "family": "gpt2", "n_embd": 35, "n_layer": 3, "n_head": 5, "n_positions": 19, "n_inner": 51}
QWEN3 = {
    **SMALL,
    "family": "qwen3",
    "hidden_size": 33,
    "intermediate_size": 47,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 14,
}


def meta_decoder(fields):
    with torch.device("meta"):
        return Decoder(ModelConfig(**fields).architecture())


def plain_state(fields, seed, dtype=torch.float32, block=BLOCK):
    decoder = meta_decoder(fields).to(dtype)
    decoder.to_empty(device="cpu")
    decoder.tie()
    for parameter in decoder.parameters():
        parameter.data.fill_(math.nan)  # whatever initialise leaves out shows
    initialise(decoder.named_parameters(), decoder.arch, seed, block)
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()}


def sharded_state(fields, seed, block):
    """On each rank: FSDP2 from meta, filled by slices, gathered again."""
    decoder = meta_decoder(fields)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for part in decoder.blocks:
        fully_shard(part, mesh=mesh)
    fully_shard(decoder, mesh=mesh)
    decoder.to_empty(device="cpu")
    decoder.tie()
    for parameter in decoder.parameters():
        parameter.detach().to_local().fill_(math.nan)
    initialise(decoder.named_parameters(), decoder.arch, seed, block)
    return {name: parameter.full_tensor().detach() for name, parameter in decoder.named_parameters()}


def scattered(shape, block):
    """On each rank: parts that are no consecutive elements; the gathered tensor."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2))
    tensor = distribute_tensor(torch.full(shape, math.nan), mesh, [Shard(0), Shard(1)])
    other = distribute_tensor(torch.full(shape, math.nan), mesh, [Replicate(), Shard(1)])
    arch = ModelConfig(**QWEN3).architecture()
    initialise([("model.layers.0.mlp.up_proj.weight", tensor)], arch, 3, block)
    initialise([("model.layers.0.mlp.up_proj.weight", other)], arch, 3, block)
    return tensor.full_tensor(), other.full_tensor()


@pytest.mark.parametrize("fields", [GPT2, QWEN3, {**QWEN3, "tie_word_embeddings": True}], ids=["gpt2", "qwen3", "tied"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_shards_are_the_slices_of_the_plain_model(ranks, fields, world):
    expected = plain_state(fields, 11, block=1000)  # blocks smaller than a tensor and no multiple of a row
    for state in ranks.run(world, sharded_state, fields, 11, 1000):
        assert state.keys() == expected.keys()
        for name, tensor in state.items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("shape", [(7, 5), (51, 33), (3, 1500)])
def test_parts_cut_in_other_dims_are_the_slices_too(ranks, shape):
    whole = torch.full(shape, math.nan)
    initialise([("model.layers.0.mlp.up_proj.weight", whole)], ModelConfig(**QWEN3).architecture(), 3, 1000)
    for both, columns in ranks.run(4, scattered, shape, 1000):
        assert torch.equal(both, whole)
        assert torch.equal(columns, whole)


def test_the_rule_per_kind():
    state = plain_state(GPT2, 5)
    residual = 0.05 / math.sqrt(2 * 3)
    for name, tensor in state.items():
        if name.endswith("norm.weight"):
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        elif name.endswith(".bias"):
            assert tensor.count_nonzero() == 0, name
        else:
            drawn = tensor[:211] if "embed_tokens" in name else tensor
            std = residual if "o_proj" in name or "down_proj" in name else 0.05
            assert abs(drawn.std().item() / std - 1) < 6 / math.sqrt(2 * drawn.numel()), name
            assert abs(drawn.mean().item()) < 6 * std / math.sqrt(drawn.numel()), name
    assert state["model.embed_tokens.weight"].shape[0] == 256
    assert state["model.embed_tokens.weight"][211:].count_nonzero() == 0


def test_seed_and_name_decide():
    first, again, other = plain_state(QWEN3, 1), plain_state(QWEN3, 1), plain_state(QWEN3, 2)
    drawn = [name for name in first if first[name].ndim == 2]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    heads = {tuple(first[name].flatten()[:20].tolist()) for name in drawn}
    assert len(heads) == len(drawn)


def test_precision_does_not_change_the_numbers():
    single, double, half = (plain_state(QWEN3, 1, dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16))
    for name, tensor in single.items():
        assert torch.equal(tensor.double(), double[name]), name
        assert torch.equal(tensor.bfloat16(), half[name]), name


def test_a_tied_head_that_lives_apart_starts_as_its_embedding():
    fields = {**QWEN3, "tie_word_embeddings": True}
    arch = ModelConfig(**fields).architecture()
    with torch.device("meta"):
        stage = Decoder(arch, range(1, 2), first=False, last=True)
    stage.to_empty(device="cpu")
    initialise(stage.named_parameters(), arch, 11)
    whole = plain_state(fields, 11)
    assert torch.equal(stage.lm_head.weight, whole["model.embed_tokens.weight"])
    for name, parameter in stage.named_parameters():
        assert name == "lm_head.weight" or torch.equal(parameter, whole[name]), name


def test_the_stream_is_pinned():
    """These numbers belong to every run: another hash, block size or draw is another run."""
    block = draw_block("17/model.norm.weight", 0)
    assert len(block) == BLOCK == 1 << 20
    assert [round(value, 4) for value in block[:3].tolist()] == [0.452, 0.8226, 1.0292]
