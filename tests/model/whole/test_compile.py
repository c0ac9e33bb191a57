"""One graph serves all blocks and all steps; layers without positions or with a window of their own are a second one."""

import pytest
import torch

from tests.model.head.test_loss import build, finish, make_batches
from windlass.model.config import ModelConfig
from windlass.model.init import initialise
from windlass.model.transformer import Decoder

GPT2 = {
    "family": "gpt2",
    "vocab_size": 211,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 40,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}

SIZES = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
OTHERS = {
    "gpt2": GPT2,
    "smollm3": {"family": "smollm3", **SIZES, "no_rope_layer_interval": 2},
    "mistral": {"family": "mistral", **SIZES, "sliding_window": 3, "rope_scaling": {"type": "yarn", "factor": 2.0}},
}


def compiled(decoder):
    """Every block of `decoder` is compiled, as a new process would -> the graphs so far, as they come."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for block in decoder.blocks:
        block.compile(fullgraph=True, backend=count)
    return graphs


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it, and hides it from users
@pytest.mark.parametrize(("family", "num_graphs"), [("llama", 1), ("gpt2", 1), ("mistral", 1), ("smollm3", 2)])
def test_blocks_compile_to_one_graph_per_kind_and_equal_eager(family, num_graphs):
    if family == "llama":
        decoder = finish(build(True))
    else:
        decoder = Decoder(ModelConfig(**OTHERS[family]).architecture())
        initialise(decoder.named_parameters(), decoder.arch, 3)
    names = [name for name, _ in decoder.named_parameters()]
    batches = make_batches(4)
    eager = [decoder(*batch).item() for batch in batches]
    graphs = compiled(decoder)
    for batch, expected in zip(batches, eager, strict=True):
        loss = decoder(*batch)
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert len(graphs) == num_graphs
    assert [name for name, _ in decoder.named_parameters()] == names
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_of_layers_with_experts_the_first_half_is_compiled_and_no_operator_of_experts():
    sparse = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
    decoder = Decoder(ModelConfig(family="qwen3_moe", **SIZES, **sparse).architecture())
    initialise(decoder.named_parameters(), decoder.arch, 3)
    graphs = compiled(decoder)
    decoder(*make_batches(1)[0]).backward()
    used = [{str(node.target) for node in graph.graph.nodes} for graph in graphs]
    of_experts = ("topk", "argsort", "grouped_mm", "softmax")
    assert not [name for names in used for name in names if any(word in name for word in of_experts)]
    products = [sum("linear" in str(node.target) for node in graph.graph.nodes) for graph in graphs]
    assert products == [4, 7], "queries, keys, values and output of a sparse layer; of a dense one the MLP too"
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(("family", "num_graphs"), [("llama", 1), ("gpt2", 1), ("mistral", 1), ("smollm3", 2)])
def test_documents_compile_to_one_graph_per_kind_however_borders_are(family, num_graphs):
    """A batch with room for another number of documents costs one more compilation, of any number at once."""
    decoder = finish(build(True)) if family == "llama" else Decoder(ModelConfig(**OTHERS[family]).architecture())
    if family != "llama":
        initialise(decoder.named_parameters(), decoder.arch, 3)
    batches = make_batches(6)
    rows, length = batches[0][0].shape
    borders = [[3, 5, 9], [1, 2, 4], [length] * 3, [6, 7], [2, 3, 4, 7, 9], [1]]
    starts = [torch.tensor([[0, *places]] * rows) for places in borders]
    eager = [decoder(*batch, documents=found).item() for batch, found in zip(batches, starts, strict=True)]
    graphs = compiled(decoder)
    for index, (batch, found, expected) in enumerate(zip(batches, starts, eager, strict=True)):
        loss = decoder(*batch, documents=found)
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-6)
        assert len(graphs) == num_graphs * (1 if index < 3 else 2)
    torch._dynamo.reset()
