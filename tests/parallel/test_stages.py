"""The cut: every block once and in order, no cheaper cut exists, names are those of the whole model."""

import itertools
import math

import pytest
import torch

from windlass.errors import UserError
from windlass.model.architecture import parameter_shapes
from windlass.model.config import ModelConfig
from windlass.model.transformer import Decoder
from windlass.parallel.config import ParallelConfig
from windlass.parallel.rules.check_layout import check_layout
from windlass.parallel.rules.schedules import KINDS
from windlass.parallel.stages import best_counts, cut_stages

SIZES = {"vocab_size": 157, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8}


def architecture(layers, tied=True, **changes):
    model = {"family": "qwen3", "intermediate_size": 40, "num_hidden_layers": layers, "tie_word_embeddings": tied}
    return ModelConfig.model_validate({**model, **SIZES, **changes}).architecture()


@pytest.mark.parametrize("schedule", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_on_one_rank_by_its_own_name(schedule, tied):
    arch, found = architecture(9, tied), {}
    stages = cut_stages(arch, 4, schedule)
    assert [layer for layers in stages.layers for layer in layers] == list(range(9))
    assert all(stages.layers), "no stage without a block"
    with torch.device("meta"):
        for rank in range(4):
            for part in stages.parts(arch, rank):
                for name, parameter in part.named_parameters():
                    assert name not in found
                    found[name] = tuple(parameter.shape)
        whole = {name: tuple(p.shape) for name, p in Decoder(arch).named_parameters()}
    mirror = {"lm_head.weight": whole["model.embed_tokens.weight"]} if tied else {}
    assert found == whole | mirror, "a tied head has a second tensor, also where both ends are on one rank"


@pytest.mark.parametrize("head", [0, 7, 55, 1000])
@pytest.mark.parametrize(("blocks", "num_stages"), [(2, 2), (7, 2), (9, 3), (11, 4), (5, 5)])
def test_no_other_cut_has_a_cheaper_slowest_stage(blocks, num_stages, head):
    block = (10, 11)
    counts = best_counts(blocks, num_stages, block=block, embedding=9, head=head)
    assert sum(counts) == blocks and min(counts) >= 1 and len(counts) == num_stages

    def slowest(counts):
        return max([*(10 * n for n in counts[:-1]), 10 * counts[-1] + head])

    every = [c for c in itertools.product(range(1, blocks + 1), repeat=num_stages) if sum(c) == blocks]
    assert slowest(counts) == min(map(slowest, every))


def test_embedding_and_head_are_counted():
    plain = best_counts(12, 4, block=(10, 10), embedding=0, head=0)
    assert plain == (3, 3, 3, 3)
    assert best_counts(12, 4, block=(10, 10), embedding=0, head=20) == (2, 4, 4, 2), "the head weighs as two blocks"
    light = best_counts(12, 4, block=(10, 10), embedding=1000, head=0)
    assert light == (3, 3, 3, 3), "a lookup takes no time: the embedding decides among equals only"
    assert best_counts(10, 3, block=(10, 10), embedding=1000, head=0)[0] == 2


def test_gpt2_on_4_ranks():
    stages = cut_stages(ModelConfig(preset="gpt2-124m").architecture(50257), 4, "1f1b")
    arch = ModelConfig(preset="gpt2-124m").architecture(50257)
    block = sum(math.prod(s) for n, s in parameter_shapes(arch).items() if ".layers.0." in n and len(s) == 2)
    assert 5.4 < arch.padded_vocab_size * arch.hidden_size / block < 5.5, "the head weighs as much as 5.5 blocks"
    assert str(stages) == "0 | 1-5 | 6-10 | 11"


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(UserError, match="there are 4 stages, 2 per rank"):
        check_layout(ParallelConfig(pp=2, schedule="zbv", zero=0), architecture(3), 2)


def test_of_experts_those_count_that_a_token_meets():
    """The cut of blocks whose MLP has as many channels as the active experts; by all experts the head would weigh nothing."""
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
    }
    experts = {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sparse = ModelConfig(family="qwen3_moe", **sizes, **experts).architecture(2000)
    dense = ModelConfig(family="qwen3", intermediate_size=64, **sizes).architecture(2000)
    assert cut_stages(sparse, 2, "1f1b").layers == cut_stages(dense, 2, "1f1b").layers
    assert len(cut_stages(sparse, 2, "1f1b").layers[1]) < 4
