"""Dropout 0.1: every layout trains what one process trains, mask for mask. transformers cannot know the masks, so the
reference is our own decoder on one process, which tests/model/test_dropout.py holds against transformers with the same masks."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
from torch.nn import functional

from tests import cases
from tests.cases import Layout
from tests.marks import quick_once
from tests.proof.test_same_loss import TOLERANCE
from windlass.data.stream.collate import sample_keys
from windlass.model import dropout, transformer
from windlass.model.config import ModelConfig
from windlass.model.open_config import architecture_of
from windlass.model.transformer import Decoder
from windlass.proof.pool import RankFailed
from windlass.proof.reference import train_reference

FIELDS = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "qwen3": {"attention_dropout": 0.1},
}
ONE = Layout(1, zero=3, replicate=1, shard=1, micro_batch=8)
LAYOUTS = {
    "one-accumulated": Layout(1, zero=3, replicate=1, shard=1, micro_batch=1),
    "ddp2": Layout(2, zero=0, replicate=2, shard=1, micro_batch=4),
    "ddp2-accumulated": Layout(2, zero=0, replicate=2, shard=1),
    "zero2-2": Layout(2, zero=2, replicate=1, shard=2),
    "zero3-2": Layout(2, zero=3, replicate=1, shard=2),
    "zero3-4-accumulated": Layout(4, zero=3, replicate=1, shard=4, micro_batch=1),
    "hsdp2x2": Layout(4, zero=3, replicate=2, shard=2, micro_batch=1),
    "one-recompute-full": Layout(1, zero=3, replicate=1, shard=1, recompute="full"),
    "zero3-2-recompute-full": Layout(2, zero=3, replicate=1, shard=2, recompute="full"),
    "zero2-2-recompute-selective": Layout(2, zero=2, replicate=1, shard=2, recompute="selective"),
    "ddp2-recompute-selective": Layout(2, zero=0, replicate=2, shard=1, recompute="selective"),
}
COMPILED = {
    "one-compiled": Layout(1, zero=3, replicate=1, shard=1, compile=True),
    "zero3-2-compiled": Layout(2, zero=3, replicate=1, shard=2, compile=True),
    "zero3-2-compiled-recompute-full": Layout(2, zero=3, replicate=1, shard=2, compile=True, recompute="full"),
}


@pytest.fixture(scope="session")
def dropped(tmp_path_factory, ranks):
    @functools.cache
    def make(family, policy):
        directory = cases.write_model(tmp_path_factory.mktemp(f"{family}-dropout"), family, True, **FIELDS[family])
        case = Layout(**{**vars(ONE), "policy": policy})
        return directory, ranks.run(1, cases.train_layout, str(directory), case)[0]

    return make


def train_mutated(mutation, directory, case):
    before = torch.get_rng_state()
    with globals()[mutation]():
        result = cases.train_layout(directory, case)
    return {**result, "drawn": not torch.equal(before, torch.get_rng_state())}


def clean_loss(directory, weights):
    """Of the last batch, by the plain decoder with these weights and without any key."""
    decoder = Decoder(architecture_of(ModelConfig.model_validate({"from": str(directory)}))).double()
    decoder.load_state_dict(weights, strict=False)
    decoder.tie()
    ids, targets = cases.global_batches()[-1]
    with torch.no_grad():
        return (decoder(ids, targets) / (targets != -100).sum()).item()


def check(ranks, dropped, family, case, mutation="nothing"):
    directory, expected = dropped(family, case.policy)
    limit_s = 300 if case.compile else 120  # gpt2, cache cold, busy machine: 102 s; warm: 22 s
    for result in ranks.run(case.world, train_mutated, mutation, str(directory), case, timeout_s=limit_s):
        for name in ("losses", "norms", "evaluations"):
            worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(result[name], expected[name], strict=True))
            assert worst <= TOLERANCE[case.policy], (name, worst, result[name], expected[name])
        assert not result["drawn"], "nobody draws from the global generator"
        last = clean_loss(directory, {name: weight.double() for name, weight in result["weights"].items()})
        assert abs(result["evaluations"][-1] - last) <= TOLERANCE[case.policy], "evaluation drops nothing"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FIELDS)
def test_every_layout_has_the_masks_of_one_process(ranks, dropped, family, layout):
    check(ranks, dropped, family, LAYOUTS[layout])


@pytest.mark.parametrize(
    "layout", ["ddp2-accumulated", "zero3-2-recompute-full", pytest.param("hsdp2x2", marks=pytest.mark.long)]
)
def test_every_layout_has_the_masks_of_one_process_in_fp32(ranks, dropped, layout):
    check(ranks, dropped, "gpt2", Layout(**{**vars(LAYOUTS[layout]), "policy": "fp32"}))


@pytest.mark.long
@pytest.mark.parametrize("layout", COMPILED)
@pytest.mark.parametrize("family", FIELDS)
def test_compiled_blocks_have_the_masks_of_one_process(ranks, dropped, family, layout):
    check(ranks, dropped, family, COMPILED[layout])


@pytest.mark.parametrize("family", FIELDS)
def test_something_is_dropped_at_all(dropped, family):
    """The same weights and batches without dropout lose something else, by far more than any tolerance."""
    directory, result = dropped(family, "fp64")
    undropped = train_reference(
        cases.write_model(directory / "clean", family, True), cases.global_batches(), torch.float64, cases.SETTINGS
    )
    differences = [abs(a - b) for a, b in zip(result["losses"], undropped.losses, strict=True)]
    assert min(differences) > 1e-4, differences


# ---- mutations: each turns a row red


def nothing():
    return contextlib.nullcontext()


def keys_of_the_rank():
    """A sample's place in its rank's own batch, in place of its place in the stream."""
    size = cases.SEQUENCES
    return mock.patch.object(cases, "keys_of", lambda step, mine: sample_keys(3, step * size, mine.stop - mine.start))


def keys_of_the_first_step():
    return mock.patch.object(cases, "keys_of", lambda step, mine: sample_keys(3, mine.start, mine.stop - mine.start))


def other_masks_in_recomputation():
    """What a generator without saved states would do."""
    drop = transformer.dropout

    def other(x, probability, keys_B, place, *slice_of):
        return drop(x, probability, keys_B + (torch._C._current_graph_task_id() != -1), place, *slice_of)

    return mock.patch.object(transformer, "dropout", other)


def places_left_out():
    """Attention's output and the MLP's share a mask."""
    fold = dropout.fold
    return mock.patch.object(
        dropout, "fold", lambda keys, number: keys if isinstance(number, int) else fold(keys, number)
    )


def layers_left_out():
    return mock.patch.object(transformer, "layer_keys", lambda keys_B, layers: keys_B.expand(len(layers), -1))


def drawn_from_a_generator():
    """torch's own dropout: each rank draws what it draws."""
    return mock.patch.object(transformer, "dropout", lambda x, probability, *_: functional.dropout(x, probability))


def evaluation_that_drops():
    return mock.patch.object(Decoder, "eval", lambda self: self)


RED = [
    (keys_of_the_rank, "ddp2"),
    (keys_of_the_rank, "hsdp2x2"),
    (keys_of_the_first_step, "one-accumulated"),
    (other_masks_in_recomputation, "one-recompute-full"),
    (other_masks_in_recomputation, "zero2-2-recompute-selective"),
    (places_left_out, "one-accumulated"),
    (layers_left_out, "zero3-2"),
    (drawn_from_a_generator, "zero3-2"),
    (evaluation_that_drops, "ddp2"),
]


@pytest.mark.parametrize("policy", ["fp64", pytest.param("fp32", marks=pytest.mark.long)])
@pytest.mark.parametrize(("mutation", "layout"), quick_once(RED), ids=lambda value: getattr(value, "__name__", value))
def test_the_comparison_turns_red(ranks, dropped, mutation, layout, policy):
    case = Layout(**{**vars(LAYOUTS[layout]), "policy": policy})
    with pytest.raises(AssertionError) as caught:
        check(ranks, dropped, "gpt2", case, mutation.__name__)
    assert not isinstance(caught.value, RankFailed), "the ranks trained on; it is the comparison that finds it"
