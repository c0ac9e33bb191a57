"""Files written tensor by tensor: what safetensors itself reads. Of every family, and with an index: test_hf."""

import pytest
import torch
from safetensors.torch import load, load_file, save

from tests.live_bytes import LiveBytes
from tests.model.tiny import hf_model, our_model
from windlass.model.names import stored_shapes
from windlass.model.shard_writer import ShardWriter


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "phi3"])
def test_a_file_holds_what_came_in_any_order_and_in_parts(tmp_path, family, dtype):
    """phi3 stores three of our matrices as one, GPT-2 turned round."""
    decoder = our_model(hf_model(family, False))
    parameters = dict(decoder.named_parameters())
    for place, names in (("there", list(parameters)), ("back", list(parameters)[::-1])):
        (tmp_path / place).mkdir()
        writer = ShardWriter(tmp_path / place, decoder.arch, dtype, 10**9)
        for name in names:
            writer.add(name, parameters[name].detach())
        writer.finish()
    files = [tmp_path / place / "model.safetensors" for place in ("there", "back")]
    assert files[0].read_bytes() == files[1].read_bytes()
    found = load_file(files[0])
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == stored_shapes(decoder.arch)
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    again = load(save(found))
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert found.keys() & parameters
    for name in found.keys() & parameters:  # without the rows that our vocabulary is padded by
        assert torch.equal(found[name], parameters[name].detach()[: found[name].shape[0]].to(dtype)), name


def test_a_part_that_comes_twice_is_a_bug_and_one_that_does_not_come_is_named(tmp_path):
    decoder = our_model(hf_model("llama", False))
    writer = ShardWriter(tmp_path, decoder.arch, torch.float32, 10**9)
    writer.add("model.norm.weight", decoder.model.norm.weight.detach())
    with pytest.raises(AssertionError, match=r"model\.norm\.weight came twice"):
        writer.add("model.norm.weight", decoder.model.norm.weight.detach())
    with pytest.raises(AssertionError, match=r"never came: \['lm_head\.weight'"):
        writer.finish()


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    """Held until its shard was complete, all of them were: a second model beside the first."""
    decoder = our_model(hf_model("llama", False))
    writer = ShardWriter(tmp_path, decoder.arch, torch.float32, 10**9)
    parameters = [(name, parameter.detach()) for name, parameter in decoder.named_parameters()]
    with LiveBytes() as live:
        for name, tensor in parameters:
            writer.add(name, tensor)
    model, largest = (pick(tensor.nbytes for _, tensor in parameters) for pick in (sum, max))
    assert model <= live.peak + 4 * decoder.arch.hidden_size and live.peak <= model + largest
