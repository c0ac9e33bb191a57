"""Loading costs a rank its own share and one block of memory, and a host one reading of every file."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from tests.model.whole.loading import load_watched
from windlass.model.architecture import parameter_shapes
from windlass.model.config import ModelConfig
from windlass.model.families.family_table import to_hf

WORLD = 4
SLACK = 2 << 20  # what allocator and thread take beside; measured 0.2 MB
SIZES = {
    "family": "llama",
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A directory of bf16 weights in one file per block; (path, bytes of its files, sum of its elements)."""
    path = tmp_path_factory.mktemp("sharded")
    arch = ModelConfig(**SIZES).architecture()
    generator = torch.Generator().manual_seed(1)
    files, where, total = {}, {}, 0.0
    for name, shape in parameter_shapes(arch).items():
        layer = name.split(".")[2] if ".layers." in name else "rest"
        tensor = torch.randn(shape, generator=generator).to(torch.bfloat16)
        total += float(tensor.double().sum())
        files.setdefault(f"model-{layer}.safetensors", {})[name] = tensor
        where[name] = f"model-{layer}.safetensors"
    for file, tensors in files.items():
        save_file(tensors, path / file, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (path / "config.json").write_text(json.dumps(to_hf(arch)))
    return path, sum((path / file).stat().st_size for file in files), total


def forget(path):
    """Drops the files from the page cache, so that the next reading is the storage's."""
    for file in path.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def test_each_byte_is_read_once_per_host_and_memory_is_the_share_and_a_block(ranks, sharded):
    path, num_bytes, total = sharded
    forget(path)
    ranks.close()  # ranks that have served others take memory from what those have freed, and do not grow
    found = ranks.run(WORLD, load_watched, str(path))
    assert sum(rank["sum"] for rank in found) == pytest.approx(total, abs=1e-6)
    shapes = parameter_shapes(ModelConfig(**SIZES).architecture())
    piece = max(torch.Size(shape).numel() for shape in shapes.values()) * 4 // WORLD
    block = sum(torch.Size(shape).numel() * 4 for name, shape in shapes.items() if ".layers.0." in name)
    assert piece + SLACK < block
    assert sum(rank["share"] for rank in found) < 1.02 * 2 * num_bytes, "fp32 from bf16, each element on one rank"
    for rank in found:
        assert 0.9 * rank["share"] < rank["growth"] <= rank["share"] + piece + SLACK, "one tensor's share at a time"
    read = sum(rank["read"] for rank in found)
    if read:  # else the directory is in memory (tmpfs), where nothing is read
        assert 0.9 * num_bytes <= read <= 1.05 * num_bytes
