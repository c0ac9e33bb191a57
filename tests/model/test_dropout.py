"""The mask is a function of sample, layer, site and element: the same in any slice, dtype and graph; else unlike any other."""

import math
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.model.tiny import batch, canonical, hf_model, our_model, unpadded
from tests.model.whole.parity import summed_loss, without_detours_through_fp32
from windlass.model.dropout import (
    ATTENTION,
    ATTENTION_OUTPUT,
    EMBEDDING,
    MLP_OUTPUT,
    dropout,
    fold_keys,
    keep_mask,
    layer_keys,
    row_keys,
)

SHAPE = (4, 64, 96)  # B, T, D
COUNT = math.prod(SHAPE)
KEYS = torch.tensor([3, -(2**63), 2**63 - 1, 1234567890123456789])


def kept(probability=0.1, keys=KEYS, site=MLP_OUTPUT, layer=0, shape=SHAPE):
    ones = torch.ones(len(keys), *shape[1:])
    return dropout(ones, probability, layer_keys(keys, torch.tensor([layer]))[0], site) != 0


def correlation(one, two):
    """Of two masks, in standard deviations of what independent ones have."""
    pair = torch.stack((one.flatten().double(), two.flatten().double()))
    return torch.corrcoef(pair)[0, 1].item() * math.sqrt(pair.shape[1])


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9])
def test_the_rate_is_the_probability_in_every_sample_row_and_column(probability):
    keys = fold_keys(torch.arange(64), 5)
    mask = kept(probability, keys).double()
    spread = math.sqrt(probability * (1 - probability))
    assert abs(1 - probability - mask.mean().item()) < 4 * spread / math.sqrt(mask.numel())
    for dims, worst in (
        ((1, 2), 4),
        ((0, 2), 4),
        ((0, 1), 4),
        (0, 5),
    ):  # the largest of that number, in standard deviations
        means = mask.mean(dims)
        deviations = (means - 1 + probability).abs() / (spread / math.sqrt(mask.numel() / means.numel()))
        assert deviations.max() < worst + (1.5 if probability in (0.01, 0.9) else 0), dims
        chi = deviations.square().mean().item()  # as if drawn: spread neither more nor less evenly
        assert abs(chi - 1) < 4 * math.sqrt(2 / deviations.numel()), dims


def test_masks_of_other_samples_layers_and_places_are_independent():
    masks = {
        "itself": kept(),
        "samples": kept(keys=KEYS + 1000),
        "samples in another order": kept(keys=KEYS.roll(1)),
        "layer": kept(layer=1),
        "embedding": kept(layer=EMBEDDING),
        "attention": kept(site=ATTENTION),
        "attention output": kept(site=ATTENTION_OUTPUT),
    }
    names = list(masks)
    for at, one in enumerate(names):
        for two in names[at + 1 :]:
            assert abs(correlation(masks[one], masks[two])) < 4, (one, two)
    assert torch.equal(kept(), masks["itself"])


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("distance", [1, 2, 3])
def test_neighbours_are_independent(dim, distance):
    mask = kept(0.5, keys=torch.arange(16))
    length = mask.shape[dim] - distance
    assert abs(correlation(mask.narrow(dim, 0, length), mask.narrow(dim, distance, length))) < 4


def test_pairs_and_triples_of_neighbours_come_as_often_as_drawn_ones():
    bits = kept(0.5, keys=torch.arange(64)).long()
    triples = 4 * bits[..., :-2] + 2 * bits[..., 1:-1] + bits[..., 2:]
    counts = torch.bincount(triples.flatten(), minlength=8).double()
    expected = triples.numel() / 8
    assert ((counts - expected).abs() / math.sqrt(expected)).max() < 5


def test_rows_whose_keys_differ_in_one_bit_have_independent_masks():
    for bit in range(64):
        rows = torch.tensor([7, 7 ^ (1 << bit if bit < 63 else -(1 << 63))])
        one, two = keep_mask(rows, torch.arange(20000), 0.5)
        assert abs(correlation(one, two)) < 5, bit


def test_the_kept_are_scaled_so_that_the_expectation_is_kept():
    x = torch.rand(256, 16, 24, dtype=torch.float64) + 1
    dropped = dropout(x, 0.1, torch.arange(256), ATTENTION_OUTPUT)
    kept = dropped != 0
    assert torch.equal(dropped[kept], (x * (1 / 0.9))[kept])
    assert abs(dropped.mean().item() - x.mean().item()) < 0.01


def test_the_gradient_goes_where_the_value_went():
    x = torch.randn(SHAPE, requires_grad=True)
    weights = torch.randn(SHAPE)
    (dropout(x, 0.3, KEYS, MLP_OUTPUT) * weights).sum().backward()
    assert torch.equal(x.grad, dropout(weights, 0.3, KEYS, MLP_OUTPUT))


def test_nothing_is_dropped_without_keys_or_probability():
    x = torch.randn(SHAPE)
    assert dropout(x, 0.3, None, MLP_OUTPUT) is x
    assert dropout(x, 0.0, KEYS, MLP_OUTPUT) is x


@pytest.mark.parametrize(
    ("samples", "positions", "columns"),
    [
        (slice(1, 3), slice(None), slice(None)),
        (slice(None), slice(16, 48), slice(None)),
        (slice(None), slice(None), slice(32, 64)),
        (slice(2, 4), slice(3, None, 2), slice(95, 96)),  # a context rank may hold positions that are no run
    ],
)
def test_a_slice_has_the_slice_of_the_whole_mask(samples, positions, columns):
    x = torch.randn(SHAPE)
    mine = (torch.arange(length, dtype=torch.int32)[cut] for length, cut in zip(SHAPE[1:], (positions, columns)))
    part = dropout(x[samples, positions, columns], 0.3, KEYS[samples], MLP_OUTPUT, *mine)
    assert torch.equal(part, dropout(x, 0.3, KEYS, MLP_OUTPUT)[samples, positions, columns])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_has_the_same_mask_and_keeps_its_dtype(dtype):
    dropped = dropout(torch.ones(SHAPE, dtype=dtype), 0.1, KEYS, MLP_OUTPUT)
    assert dropped.dtype == dtype and torch.equal(dropped != 0, kept_plain())


def kept_plain():
    return dropout(torch.ones(SHAPE), 0.1, KEYS, MLP_OUTPUT) != 0


def python_mask(key, site, position, column, probability):
    """One element by Python's integers: the formula of the file's head, for what wraps in int32 and int64."""
    word = (1 << 64) - 1

    def fold(key, number):
        return mix((key + (number + 1) * 0x9E3779B97F4A7C15) & word)

    def mix(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & word
        x = (x ^ x >> 27) * 0x94D049BB133111EB & word
        return x ^ x >> 31

    row = mix(fold(key, site) ^ position)
    x = (row + column) * 0x9E3779B9 & 0xFFFFFFFF ^ row >> 32
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    signed = x - (1 << 32) if x >> 31 else x
    return signed >= round(probability * 2**32) - 2**31


def test_the_mask_is_the_formula_bit_for_bit():
    """Runs of every machine and version must see it: a changed mask is another run."""
    mask = dropout(torch.ones(4, 5, 7), 0.3, KEYS, MLP_OUTPUT) != 0
    for sample, key in enumerate(KEYS.tolist()):
        for position in range(5):
            for column in range(7):
                wanted = python_mask(key, MLP_OUTPUT, position, column, 0.3)
                assert mask[sample, position, column].item() == wanted, (sample, position, column)


def test_rows_of_attention_have_a_coordinate_per_dim():
    heads, positions = torch.arange(6), torch.arange(10)
    rows = row_keys(KEYS, ATTENTION, heads, positions)
    assert rows.shape == (4, 6, 10) and rows.unique().numel() == rows.numel()
    assert torch.equal(row_keys(KEYS[1:], ATTENTION, heads[2:4], positions[5:]), rows[1:, 2:4, 5:])


def test_no_generator_is_touched():
    before = torch.get_rng_state()
    dropout(torch.ones(SHAPE, requires_grad=True), 0.1, KEYS, MLP_OUTPUT).sum().backward()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # met by the compiler's own imports
@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_is_the_same_mask_with_one_graph_for_all_steps(dtype):
    """By the compiler's own kernels, so a compiler is needed. Columns that fill no vector; both widths of numbers."""
    graphs = []

    def count(graph, inputs):
        from torch._inductor.compile_fx import compile_fx

        graphs.append(graph)
        return compile_fx(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(dropout, backend=count, fullgraph=True)
    x = torch.randn(4, 13, 36, dtype=dtype, requires_grad=True)
    for number in range(4):
        ours, theirs = (drop(x, 0.1, KEYS + number, MLP_OUTPUT) for drop in (compiled, dropout))
        assert torch.equal(ours, theirs)
        assert torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in (ours, theirs)))
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_the_mask_is_kept_for_backward_in_one_byte_per_element():
    kept_bytes = []

    def pack(tensor):
        kept_bytes.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        dropout(torch.randn(SHAPE, requires_grad=True), 0.1, KEYS, MLP_OUTPUT)
    assert COUNT <= sum(kept_bytes) <= 1.1 * COUNT


# ---- in the model: transformers with our masks in its sites


class OurMask(nn.Module):
    """In the place of a Dropout of transformers: a layer's mask by the same keys; weights [B, H, T, S] or hidden [B, T, D]."""

    def __init__(self, keys_B, site, probability):
        super().__init__()
        self.keys_B, self.site, self.p = keys_B, site, probability

    def forward(self, x):
        coordinates = [torch.arange(size) for size in x.shape[1:]]
        rows = row_keys(self.keys_B, self.site, *coordinates[:-1])
        return x * keep_mask(rows, coordinates[-1], self.p) / (1 - self.p)


KEYS_3 = torch.tensor([5, 6, -7])
GPT2_FIELDS = {"resid_pdrop": 0.2, "embd_pdrop": 0.3, "attn_pdrop": 0.4}


def with_our_masks(model, probabilities):
    """transformers' GPT-2, in training, with our masks where its config has a probability."""
    keys = layer_keys(KEYS_3, torch.arange(len(model.transformer.h)))
    model.transformer.drop = OurMask(fold_keys(KEYS_3, EMBEDDING), EMBEDDING, probabilities["embd_pdrop"])
    for keys_B, block in zip(keys, model.transformer.h, strict=True):
        block.attn.resid_dropout = OurMask(keys_B, ATTENTION_OUTPUT, probabilities["resid_pdrop"])
        block.mlp.dropout = OurMask(keys_B, MLP_OUTPUT, probabilities["resid_pdrop"])
    return model.train()


def masked_attention(model, probability):
    """transformers' eager attention drops by `functional.dropout`, layer after layer; so it does here, by our masks."""
    model.set_attn_implementation("eager")
    keys = layer_keys(KEYS_3, torch.arange(3))
    masks = iter([OurMask(keys_B, ATTENTION, probability) for keys_B in keys])

    def masked(x, p, training):
        assert (p, training) == (probability, True)
        return next(masks)(x)

    return mock.patch.object(functional, "dropout", masked)


def assert_equal_in_training(decoder, model):
    ids, targets = batch(decoder.arch.vocab_size)
    ours = decoder.train()(ids, keys=KEYS_3)
    theirs = model(input_ids=ids, use_cache=False).logits
    assert (ours - theirs).abs().max() < 1e-11
    summed_loss(theirs, targets).backward()
    decoder(ids, targets, keys=KEYS_3).backward()
    gradients = canonical({name: parameter.grad for name, parameter in model.named_parameters()}, decoder.arch)
    for name, parameter in decoder.named_parameters():
        difference = unpadded(name, parameter.grad, decoder.arch) - gradients[name]
        assert difference.abs().max() < 1e-9 * max(1.0, gradients[name].abs().max().item()), name


@pytest.mark.parametrize("site", [*GPT2_FIELDS, "all"])
def test_gpt2_drops_where_transformers_does(site):
    fields = GPT2_FIELDS if site == "all" else {**dict.fromkeys(GPT2_FIELDS, 0.0), site: GPT2_FIELDS[site]}
    model = hf_model("gpt2", True, torch.float64, **fields)
    decoder = our_model(model)
    clean = decoder(batch(211)[0])
    with masked_attention(model, fields["attn_pdrop"]):
        assert_equal_in_training(decoder, with_our_masks(model, fields))
    assert (decoder(batch(211)[0], keys=KEYS_3) - clean).abs().max() > 0.1, "something was dropped"


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "smollm3"])
def test_the_rotary_families_drop_attentions_weights_where_transformers_does(family):
    """Mistral's window of 7 included, and grouped heads."""
    model = hf_model(family, False, torch.float64, attention_dropout=0.3)
    decoder = our_model(model)
    in_fp64 = mock.patch.object(functional, "softmax", lambda x, dim, dtype: x.softmax(dim))
    with without_detours_through_fp32(model.train()), masked_attention(model, 0.3), in_fp64:
        assert_equal_in_training(decoder, model)


def test_on_average_the_loss_is_that_of_transformers():
    """One sample many times, each time with another key: mean and spread of its loss, for each site alone."""
    copies = 400
    for site in GPT2_FIELDS:
        model = hf_model("gpt2", True, **{**dict.fromkeys(GPT2_FIELDS, 0.0), site: 0.1})
        decoder = our_model(model)
        row_ids, row_targets = (x[1:2] for x in batch(211))
        ids, targets = row_ids.expand(copies, -1), row_targets.expand(copies, -1)
        torch.manual_seed(0)
        with torch.no_grad():
            clean = functional.cross_entropy(decoder(row_ids)[0], row_targets[0]).item()
            many = model.train()(input_ids=ids, use_cache=False).logits, decoder.train()(ids, keys=torch.arange(copies))
        theirs, ours = (
            functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1) for logits in many
        )
        assert ours.std() > 1e-3 and abs(ours.std() / theirs.std() - 1) < 0.25, (site, ours.std(), theirs.std())
        error = math.hypot(ours.std().item(), theirs.std().item()) / math.sqrt(copies)
        assert abs(ours.mean() - theirs.mean()) < 4 * error, site
        assert abs(ours.mean() - clean) < 0.2 * clean


def test_without_dropout_training_is_transformers_own_training():
    model = hf_model("gpt2", True, torch.float64).train()
    ids = batch(211)[0]
    assert (our_model(model.eval()).train()(ids, keys=KEYS_3) - model.train()(input_ids=ids).logits).abs().max() < 1e-11


def test_evaluation_and_generation_never_drop():
    decoder = our_model(hf_model("gpt2", True, **GPT2_FIELDS))
    ids, targets = batch(211)
    clean = decoder(ids, targets).item()
    assert decoder(ids, targets, keys=KEYS_3).item() == clean
    decoder.train()
    assert decoder(ids, targets, keys=KEYS_3).item() != clean
    with torch.no_grad():
        assert decoder(ids, targets).item() == clean, "text is made without keys"


def test_training_without_keys_is_a_mistake_of_ours():
    decoder = our_model(hf_model("gpt2", True, **GPT2_FIELDS)).train()
    with pytest.raises(AssertionError, match="a key per sample"):
        decoder(*batch(211))


def test_a_pipeline_stage_drops_what_the_whole_model_drops():
    from windlass.model.transformer import Decoder

    whole = our_model(hf_model("gpt2", False, **GPT2_FIELDS)).train()
    ids = batch(211)[0]
    hidden = ids
    for layers, first, last in ((range(1), True, False), (range(1, 3), False, True)):
        stage = Decoder(whole.arch, layers, first, last).train()
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
        hidden = stage(hidden, keys=KEYS_3)
    assert torch.equal(hidden, whole(ids, keys=KEYS_3))
