"""One graph serves all blocks and all steps."""

import pytest
import torch

from tests.model.test_loss import build, finish, make_batches
from windlass.model.config import ModelConfig
from windlass.model.init import initialise
from windlass.model.transformer import Decoder

GPT2 = {"family": "gpt2", "vocab_size": 211, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 40}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it, and hides it from users
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_blocks_compile_to_one_graph_and_equal_eager(family):
    if family == "llama":
        decoder = finish(build(True))
    else:
        decoder = Decoder(ModelConfig(**GPT2).architecture())
        initialise(decoder.named_parameters(), decoder.arch, 3)
    names = [name for name, _ in decoder.named_parameters()]
    batches = make_batches(4)
    eager = [decoder(*batch).item() for batch in batches]
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for block in decoder.blocks:
        block.compile(fullgraph=True, backend=count)
    for batch, expected in zip(batches, eager, strict=True):
        loss = decoder(*batch)
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert len(graphs) == 1
    assert [name for name, _ in decoder.named_parameters()] == names
    torch._dynamo.reset()
