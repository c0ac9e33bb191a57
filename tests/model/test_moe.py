"""Experts: the grouped product against experts one by one, the sort and its way back, routing as transformers has it."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.model.tiny import batch, hf_model, our_model
from windlass.model import moe
from windlass.model.config import architecture_from_hf
from windlass.model.moe import Experts, MoE, count_rows, is_grouped, sort_rows
from windlass.parallel.recompute import _policy

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 50,
}


def layer(experts=5, chosen=2, size=24, dtype=torch.float32, normed=True):
    fields = {"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": size}
    arch = architecture_from_hf({"model_type": "qwen3_moe", **SIZES, **fields, "norm_topk_prob": normed})
    torch.manual_seed(0)
    made = MoE(arch).to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.3)
    return made


def run(made, hidden):
    """-> what it made, and every gradient."""
    hidden = hidden.clone().requires_grad_()
    out, _ = made(hidden, None)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    gradients = torch.autograd.grad((out * weight).sum(), [hidden, *made.parameters()])
    return [out.detach(), *gradients]


def test_rows_are_sorted_by_expert_and_come_back():
    expert = torch.tensor([3, 0, 3, 1, 0, 3])
    order, inverse = sort_rows(expert)
    assert expert[order].tolist() == [0, 0, 1, 3, 3, 3] and order.tolist() == [1, 4, 3, 0, 2, 5]
    assert torch.equal(order[inverse], torch.arange(6))
    assert count_rows(expert[order], 5).tolist() == [2, 1, 0, 3, 0]


@pytest.mark.parametrize("idle", [False, True])
def test_the_grouped_product_is_that_of_experts_one_by_one(idle):
    made, hidden = layer(), torch.randn(3, 7, 16)
    if idle:
        hidden = hidden[:1, :1]  # one token, two experts: the others have no row, and a gradient of zeros
    assert is_grouped(torch.float32, made.experts.gate_proj.weight.shape[1:])
    grouped = run(made, hidden)
    with mock.patch.object(moe, "is_grouped", lambda *_: False):
        plain = run(made, hidden)
    for ours, theirs in zip(grouped, plain, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    if idle:
        assert sum(not matrix.any() for matrix in grouped[3]) == 3


def test_experts_one_by_one_are_the_sum_over_all_experts():
    """Every expert on every token, weighted by the router's matrix with zeros: no sort, no choice of rows."""
    made, hidden = layer(dtype=torch.float64, normed=False), torch.randn(3, 7, 16, dtype=torch.float64)
    p = made.gate(hidden).softmax(-1)
    weights = torch.zeros_like(p).scatter(-1, p.topk(2).indices, p.topk(2).values)
    gate, up, down = (getattr(made.experts, f"{name}_proj").weight for name in ("gate", "up", "down"))
    inner = torch.nn.functional.silu(torch.einsum("btd,efd->btef", hidden, gate))
    whole = torch.einsum("btef,edf->bted", inner * torch.einsum("btd,efd->btef", hidden, up), down)
    expected = (whole * weights[..., None]).sum(2)
    assert (made(hidden, None)[0] - expected).abs().max() <= 1e-13
    assert torch.autograd.gradcheck(lambda x: made(x, None)[0], hidden[:1, :3].requires_grad_())


def test_weights_multiply_once_and_are_normed_where_the_config_says_so():
    made, hidden = layer(chosen=3, normed=True), torch.randn(1, 4, 16)
    with torch.no_grad():  # all experts alike: what comes out is one expert's word, times the sum of the weights
        for matrix in (made.experts.gate_proj, made.experts.up_proj, made.experts.down_proj):
            matrix.weight.copy_(matrix.weight[:1].expand_as(matrix.weight))
    as_they_are = torch.arange(4)
    one = made.experts.compute(hidden[0], as_they_are, as_they_are, torch.tensor([4, 0, 0, 0, 0]))
    assert (made(hidden, None)[0][0] - one).abs().max() <= 1e-5
    made.is_normed = False
    p = made.gate(hidden).softmax(-1).topk(3).values.sum(-1)
    assert (made(hidden, None)[0][0] - one * p[0, :, None]).abs().max() <= 1e-5


def test_tokens_that_do_not_count_are_routed_and_leave_no_statistics():
    made, hidden = layer(), torch.randn(2, 5, 16)
    counted = torch.tensor([[True] * 3 + [False] * 2, [False] * 5])
    out, (counts, mass) = made(hidden, counted)
    assert torch.equal(out, made(hidden, None)[0])
    _, (expected, probabilities) = made(hidden[:1, :3], None)
    assert torch.equal(counts[0], expected[0]) and counts.sum(1).tolist() == [6, 0]
    assert (mass[0] - probabilities[0]).abs().max() <= 1e-6 and not mass[1].any()


def test_an_expert_takes_all_rows_where_all_tokens_want_it():
    """No capacity, nothing dropped."""
    made = layer(chosen=1)
    with torch.no_grad():
        made.gate.weight.zero_()
        made.gate.weight[2] = 1.0
    hidden = torch.rand(2, 9, 16) + 0.1
    _, (counts, _) = made(hidden, None)
    assert counts.sum(0).tolist() == [0, 0, 18, 0, 0]


def test_the_choice_is_that_of_transformers_in_bf16_too():
    model = hf_model("qwen3_moe", True, torch.bfloat16)
    theirs, ours = model.model.layers[0].mlp, our_model(model).model.layers["0"].mlp
    hidden = torch.randn(2, 11, 48, dtype=torch.bfloat16)
    _, weights, chosen = theirs.gate(hidden)
    with mock.patch.object(Experts, "forward", lambda _self, _hidden, *routed: routed):
        mine, _ = ours(hidden, None)
    assert torch.equal(mine[0], chosen) and torch.equal(mine[1], weights)


def test_selective_recomputation_keeps_the_choice():
    """The top-k is replayed: had the numbers changed in backward, the same experts were taken."""
    p, sign, seen = torch.tensor([0.1, 0.3, 0.2, 0.4], requires_grad=True), [1.0], []

    def choose(p):
        values, chosen = (p * sign[0]).topk(2)
        seen.append(chosen.tolist())
        return (values * values).sum()

    contexts = partial(create_selective_checkpoint_contexts, _policy)
    out = checkpoint(choose, p, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    sign[0] = -1.0
    out.backward()
    assert seen == [[3, 1], [3, 1]]


def test_greedy_text_is_that_of_transformers():
    model = hf_model("qwen3_moe", True)
    ids, _ = batch(211, 1, 6)
    theirs = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    decoder = our_model(model)
    for _ in range(5):
        ids = torch.cat((ids, decoder(ids)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(ids, theirs)
