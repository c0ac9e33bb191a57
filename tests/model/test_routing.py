"""The routers' loss against transformers' own function, and what does not change it."""

import dataclasses

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.model.tiny import batch, hf_model, our_model

COEFFICIENT = 0.02
FIELDS = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}


def pair(dtype=torch.float64, **changes):
    """transformers' model, and ours in training."""
    model = hf_model("qwen3_moe", True, dtype, **FIELDS, **changes)
    return model, our_model(model).train()


def gradients(decoder):
    found = {name: parameter.grad.clone() for name, parameter in decoder.named_parameters()}
    decoder.zero_grad()
    return found


@pytest.mark.parametrize("masked", [False, True])
def test_one_layer_and_one_sequence_train_as_transformers_does(masked):
    """Its loss with labels, which has the routers' in it: value and gradients, in fp32, where its router computes."""
    model, decoder = pair(torch.float32, num_hidden_layers=1, mlp_only_layers=[])
    ids, _ = batch(211, 1, 12)
    mask = torch.ones_like(ids)
    labels = ids.roll(-1, 1)
    if masked:
        mask[:, 9:], labels[:, 9:] = 0, -100
    out = model(input_ids=ids, attention_mask=mask, shift_labels=labels, labels=labels, use_cache=False)
    out.loss.backward()
    count = (labels != -100).sum()
    decoder.routing.begin(1.0 / count)
    loss = decoder(ids, labels) / count
    loss.backward()
    device = torch.device("cpu")
    router = decoder.routing.loss(device) / count
    assert abs(router - out.aux_loss) <= 1e-5 and abs(loss + COEFFICIENT * router - out.loss) <= 1e-5
    gate = decoder.model.layers["0"].mlp.gate.weight.grad
    theirs = model.model.layers[0].mlp.gate.weight.grad
    assert (gate - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_the_loss_is_the_mean_over_layers_and_over_sequences_by_their_tokens():
    model, decoder = pair()
    ids, targets = batch(211)
    decoder(ids, targets)
    expected = torch.zeros((), dtype=torch.float64)
    for row, target in zip(ids, targets, strict=True):
        mask = (target != -100)[None].long()
        logits = model(input_ids=row[None], output_router_logits=True, use_cache=False).router_logits
        for one in logits:  # a layer and a sequence at a time: transformers' own form
            loss = load_balancing_loss_func((one,), 7, 3, mask) if mask.any() else 0.0
            expected += loss * mask.sum() / len(logits)
    assert abs(decoder.routing.loss(torch.device("cpu")) - expected) <= 1e-5 * expected


def test_micro_batches_change_neither_loss_nor_gradient():
    _, decoder = pair()
    ids, targets = batch(211)
    scale = torch.tensor(1 / 26, dtype=torch.float64)
    decoder.routing.begin(scale)
    (decoder(ids, targets) * scale).backward()
    whole, loss = gradients(decoder), decoder.routing.loss(torch.device("cpu"))
    loads = decoder.routing.loads(torch.device("cpu"))
    decoder.routing.begin(scale)
    for row, target in zip(ids, targets, strict=True):
        (decoder(row[None], target[None]) * scale).backward()
    for name, gradient in gradients(decoder).items():
        assert (gradient - whole[name]).abs().max() <= 1e-12, name
    assert abs(decoder.routing.loss(torch.device("cpu")) - loss) <= 1e-12 * loss
    assert torch.equal(decoder.routing.loads(torch.device("cpu")), loads)
    counted = int((targets != -100).sum())
    assert loads.sum(1).tolist() == [3 * counted] * 2  # both sparse layers, three experts per token


def test_ranks_of_a_sequence_add_up_counts_and_differentiate_their_own_part():
    """Two halves of a row, each with the other's counts: losses and gradients of the probabilities add up to the row's."""
    _, decoder = pair()
    torch.manual_seed(0)
    counts = torch.randint(0, 9, (2, 2, 3, 7))  # half, layer, row, expert
    counts[..., 0] += (-counts.sum(-1)) % 3  # a multiple of three experts per token
    mass = torch.rand(2, 2, 3, 7, dtype=torch.float64)
    hidden = torch.zeros(3, 5, 48, dtype=torch.float64)
    routing = decoder.routing

    def join(counts, mass):
        for routed in zip(counts, mass, strict=True):
            routing.collect(hidden, routed)
        routing.join(hidden)

    routing.begin(torch.ones(()))
    join(counts.sum(0), mass.sum(0))
    whole = routing.loss(torch.device("cpu"))
    routing.begin(torch.ones(()))
    for half in (0, 1):
        routing.sum_counts = lambda own, half=half: own + counts[1 - half]
        join(counts[half], mass[half])
    assert abs(routing.loss(torch.device("cpu")) - whole) <= 1e-12 * whole


def test_evaluation_and_a_config_without_router_loss_have_none():
    _, decoder = pair()
    ids, targets = batch(211)
    decoder.eval()(ids, targets)
    assert not decoder.routing.loads(torch.device("cpu")).any()
    decoder.arch = dataclasses.replace(decoder.arch, router_loss=False)
    decoder.routing = type(decoder.routing)(decoder.arch, decoder.arch.sparse_layers)
    decoder.train()(ids, targets).backward()
    assert decoder.routing.loss(torch.device("cpu")) == 0 and decoder.routing.loads(torch.device("cpu")).any()
    silent = hf_model("qwen3_moe", True, torch.float64)
    logits = silent(input_ids=ids, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    theirs = silent.model.layers[0].mlp.gate.weight.grad
    ours = decoder.model.layers["0"].mlp.gate.weight.grad
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_no_sequence_counts_and_nothing_is_nan():
    _, decoder = pair()
    ids, targets = batch(211)
    (decoder(ids, torch.full_like(targets, -100))).backward()
    assert decoder.routing.loss(torch.device("cpu")) == 0
    assert not any(parameter.grad.any() for parameter in decoder.parameters())
