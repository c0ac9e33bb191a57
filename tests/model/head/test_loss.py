"""The head: chunks, padding, precision, and the same gradients under FSDP2."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from windlass.model.chunks import head_tokens
from windlass.model.config import ModelConfig
from windlass.model.head import loss as loss_module
from windlass.model.head.head import Head
from windlass.model.head.loss import as_bits, factor_bits
from windlass.model.head.one_pass import one_pass
from windlass.model.init import initialise
from windlass.model.transformer import Decoder

FIELDS = {
    "family": "llama",
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}


def make_head(dtype, vocab_size=211, seed=0):
    torch.manual_seed(seed)
    head = Head(24, vocab_size, 256).to(dtype)
    hidden_BTD = torch.randn(2, 13, 24, dtype=dtype, requires_grad=True)
    targets_BT = torch.randint(vocab_size, (2, 13))
    targets_BT[0, 2:7] = -100
    return head, hidden_BTD, targets_BT


def dense(head, hidden_BTD, targets_BT):
    logits = functional.linear(hidden_BTD, head.weight[: head.vocab_size])
    wide = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(logits.flatten(0, 1).to(wide), targets_BT.flatten(), reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, 26, 1000])
@pytest.mark.parametrize("vocab_size", [211, 255, 256])
def test_any_chunk_and_padding_gives_dense_cross_entropy(chunk_tokens, vocab_size):
    head, hidden_BTD, targets_BT = make_head(torch.float64, vocab_size)
    head.chunk_tokens = chunk_tokens
    expected = dense(head, hidden_BTD, targets_BT)
    wanted = torch.autograd.grad(expected * 0.3, (hidden_BTD, head.weight))
    loss = head(hidden_BTD, targets_BT)
    given = torch.autograd.grad(loss * 0.3, (hidden_BTD, head.weight))
    assert abs(loss - expected) < 1e-12 * expected
    for ours, theirs in zip(given, wanted, strict=True):
        assert (ours - theirs).abs().max() < 1e-14
    assert given[1][vocab_size:].count_nonzero() == 0


def test_padded_rows_are_irrelevant_whatever_they_hold():
    head, hidden_BTD, targets_BT = make_head(torch.float32)
    before = head(hidden_BTD, targets_BT), head(hidden_BTD)
    with torch.no_grad():
        head.weight[211:] = 1e4
    assert torch.equal(head(hidden_BTD, targets_BT), before[0])
    assert torch.equal(head(hidden_BTD), before[1])
    assert before[1].shape == (2, 13, 211)


def test_large_logits_stay_finite():
    head, hidden_BTD, targets_BT = make_head(torch.float32)
    loss = head(hidden_BTD * 1e4, targets_BT)
    assert torch.allclose(loss, dense(head, hidden_BTD * 1e4, targets_BT))


def test_no_counted_target_gives_zero_and_no_gradient():
    head, hidden_BTD, targets_BT = make_head(torch.float32)
    loss = head(hidden_BTD, torch.full_like(targets_BT, -100))
    loss.backward()
    assert loss == 0 and hidden_BTD.grad.count_nonzero() == 0 and head.weight.grad.count_nonzero() == 0


def test_bf16_sums_in_fp32_and_returns_gradients_in_bf16():
    head, hidden_BTD, targets_BT = make_head(torch.bfloat16)
    loss = head(hidden_BTD, targets_BT)
    loss.backward()
    assert loss.dtype == torch.float32
    assert hidden_BTD.grad.dtype == head.weight.grad.dtype == torch.bfloat16
    assert torch.allclose(loss, dense(head, hidden_BTD, targets_BT), rtol=1e-6)
    wanted = torch.autograd.grad(dense(head, hidden_BTD, targets_BT), (hidden_BTD, head.weight))
    for ours, theirs in zip((hidden_BTD.grad, head.weight.grad), wanted, strict=True):
        assert (ours - theirs).float().norm() < 0.01 * theirs.float().norm()


def test_a_bf16_heads_gradient_is_added_up_in_fp32_over_hundreds_of_chunks():
    total, ones = None, torch.ones(1, 4, dtype=torch.bfloat16)
    for _ in range(300):
        total = loss_module._add_product(total, ones, ones, torch.float32)
    assert (total == 300).all(), "a sum in bf16 stays at 256"


def test_the_factor_of_a_bf16_gradient_is_not_rounded_to_bf16(monkeypatch):
    factor = 1 / 1031  # bf16 has 1 / 1032 for it: every gradient 0.1 % too small
    assert abs(torch.tensor(factor).bfloat16().double().item() / factor - 1) > 8e-4
    monkeypatch.setattr(loss_module, "SCALED_ELEMENTS", 100)  # several pieces
    head, hidden_BTD, targets_BT = make_head(torch.bfloat16)
    plain = torch.autograd.grad(head(hidden_BTD, targets_BT), (hidden_BTD, head.weight))
    scaled = torch.autograd.grad(head(hidden_BTD, targets_BT) * factor, (hidden_BTD, head.weight))
    for whole, part in zip(plain, scaled, strict=True):
        assert torch.equal(part, (whole.float() * factor).bfloat16()), "rounded once"
        assert not torch.equal(part, whole * torch.tensor(factor).bfloat16())


def test_evaluation_keeps_nothing():
    head, hidden_BTD, targets_BT = make_head(torch.float32)
    trained = head(hidden_BTD, targets_BT)
    with torch.no_grad():
        evaluated = head(hidden_BTD, targets_BT)
    assert torch.equal(trained, evaluated) and not evaluated.requires_grad


@pytest.mark.parametrize(("is_head_frozen", "products"), [(False, 3), (True, 2)])
def test_a_frozen_head_computes_no_gradient_of_its_own(is_head_frozen, products):
    head, hidden_BTD, targets_BT = make_head(torch.float32)
    head.weight.requires_grad_(not is_head_frozen)
    with FlopCounterMode(display=False) as counter:
        head(hidden_BTD, targets_BT).backward()
    assert counter.get_total_flops() == products * 2 * 26 * 24 * 256


def test_nothing_below_the_head_trained_saves_the_other_product():
    head, hidden_BTD, targets_BT = make_head(torch.float64)
    dense(head, hidden_BTD, targets_BT).backward()
    expected, head.weight.grad = head.weight.grad, None
    with FlopCounterMode(display=False) as counter:
        head(hidden_BTD.detach(), targets_BT).backward()
    assert counter.get_total_flops() == 2 * 2 * 26 * 24 * 256
    assert (head.weight.grad - expected).abs().max() <= 1e-12


def test_a_frozen_head_passes_gradients_to_the_hidden_states_alone():
    head, hidden_BTD, targets_BT = make_head(torch.float32)
    head.weight.requires_grad_(False)
    head(hidden_BTD, targets_BT).backward()
    assert head.weight.grad is None and hidden_BTD.grad.count_nonzero() > 0


def make_batches(count):
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(211, (count, 3, 18), generator=generator)
    targets = ids[:, :, 1:].clone()
    for index in range(count):
        targets[index, 0, index : 2 * index + 3] = -100
    return list(zip(ids[:, :, :-1], targets, strict=True))


def build(tied, dtype=torch.float32):
    arch = ModelConfig(**FIELDS, tie_word_embeddings=tied).architecture()
    with torch.device("meta"):
        return Decoder(arch).to(dtype)


def finish(decoder):
    decoder.to_empty(device="cpu")
    decoder.tie()
    initialise(decoder.named_parameters(), decoder.arch, 3)
    decoder.lm_head.chunk_tokens = 10
    return decoder


def plain_gradients(tied, dtype):
    decoder = finish(build(tied, dtype))
    losses = []
    for ids, targets in make_batches(4):
        loss = decoder(ids, targets)
        (loss / 101).backward()
        losses.append(loss.item())
    return losses, {name: parameter.grad for name, parameter in decoder.named_parameters()}


def sharded_gradients(tied, dtype, compute_dtype):
    """On each rank: two of four batches, summed gradients, synchronised after the last."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    decoder = build(tied, dtype)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=dtype)
    mesh = init_device_mesh("cpu", (world,))
    for part in [*decoder.blocks, decoder]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    finish(decoder)
    losses = []
    mine = make_batches(4)[rank::world]
    for index, (ids, targets) in enumerate(mine):
        decoder.set_requires_gradient_sync(index == len(mine) - 1)
        loss = decoder(ids, targets)
        (loss / 101).backward()
        losses.append(loss.item())
    gradients = {name: parameter.grad.full_tensor() for name, parameter in decoder.named_parameters()}
    assert (decoder.lm_head.weight is decoder.model.embed_tokens.weight) == tied
    with torch.no_grad():
        assert decoder(*mine[-1]).item() == losses[-1]
    return losses, gradients


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_under_fsdp2_with_accumulation_equal_one_process(ranks, tied):
    expected_losses, expected = plain_gradients(tied, torch.float64)
    results = ranks.run(2, sharded_gradients, tied, torch.float64, None)
    for rank, (losses, gradients) in enumerate(results):
        assert losses == pytest.approx(expected_losses[rank::2], rel=1e-12)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).abs().max() < 1e-13, name


def test_bf16_compute_over_fp32_shards(ranks):
    expected_losses, expected = plain_gradients(True, torch.float32)
    for rank, (losses, gradients) in enumerate(ranks.run(2, sharded_gradients, True, torch.float32, torch.bfloat16)):
        assert losses == pytest.approx(expected_losses[rank::2], rel=3e-3)
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32
            assert (gradient - expected[name]).norm() < 3e-2 * expected[name].norm(), name


def loss_and_gradients(head, hidden_BTD, targets_BT, **how):
    loss = head(hidden_BTD, targets_BT, **how)
    return loss, *torch.autograd.grad(loss, (hidden_BTD, head.weight))


@pytest.mark.parametrize("chunk_tokens", [7, 1000])
def test_a_factor_that_is_handed_in_is_in_loss_and_gradients(chunk_tokens):
    head, hidden_BTD, targets_BT = make_head(torch.float64)
    head.chunk_tokens = chunk_tokens
    per_row = as_bits(torch.tensor([[0.5, 2.0], [1.5, -1.0]]))
    for how in ({}, {"per_row_B2": per_row}):
        plain = head(hidden_BTD, targets_BT, **how) / 4
        wanted = plain, *torch.autograd.grad(plain, (hidden_BTD, head.weight))
        given = loss_and_gradients(
            head, hidden_BTD, targets_BT, factor=factor_bits(torch.tensor(4), torch.float64), **how
        )
        for ours, theirs in zip(given, wanted, strict=True):
            assert (ours - theirs).abs().max() < 1e-14 * max(1, theirs.abs().max())


def test_chunks_are_whole_tiles_where_one_fits():
    assert [head_tokens(1 << 27, size) for size in (50304, 151936, 49152)] == [2560, 768, 2688]
    assert [head_tokens(5 * 256, 256), head_tokens(1, 256)] == [5, 1]
    head = Head(8, 49100, 49152)
    head.compile_loss(1 << 30, 8192)
    assert head.chunk_tokens == 8192
    head = Head(8, 151900, 151936)
    head.compile_loss(1 << 30, 8192)
    assert head.chunk_tokens == 7040


@pytest.mark.parametrize("chunk_tokens", [7, 1000])
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("is_one_pass", [False, True])
def test_targets_count_with_their_percent(chunk_tokens, divided, is_one_pass):
    """Beside torch's cross-entropy of each target, times its weight; also by the function that is compiled."""
    head, hidden_BTD, targets_BT = make_head(torch.float64)
    head.chunk_tokens, head._one_pass = chunk_tokens, one_pass if is_one_pass else None
    percent_BT = torch.randint(1, 101, targets_BT.shape)
    logits = functional.linear(hidden_BTD, head.weight[: head.vocab_size]).flatten(0, 1)
    each = functional.cross_entropy(logits, targets_BT.flatten(), reduction="none", ignore_index=-100)
    wanted = (each * percent_BT.flatten() / 100).sum() / (4 if divided else 1)
    wanted = wanted, *torch.autograd.grad(wanted, (hidden_BTD, head.weight))
    factor = {"factor": factor_bits(torch.tensor(4.0), torch.float64)} if divided else {}
    given = loss_and_gradients(head, hidden_BTD, targets_BT, percent_BT=percent_BT, **factor)
    for ours, theirs in zip(given, wanted, strict=True):
        assert (ours - theirs).abs().max() < 1e-13 * max(1, theirs.abs().max())
