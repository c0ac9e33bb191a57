"""Rows of several documents against transformers run on each document alone, and against its own packed rows; leaks."""

import dataclasses
from unittest import mock

import pytest
import torch

from tests.model.tiny import CASES, FAMILIES, SCALINGS, batch, hf_model, our_model
from tests.model.whole.parity import check_gradients, summed_loss, without_detours_through_fp32
from windlass.model.attention.documents import Documents, find_documents

STARTS = torch.tensor([[0, 5, 6, 17], [0, 17, 17, 17], [0, 3, 7, 8]])  # in rows of 17; the last number fills up
WINDOW = {"use_sliding_window": True}
THETA = {"rope_theta": 500.0}
CHANGED = [
    ("llama", {"rope_parameters": {**SCALINGS["llama3"], **THETA}}),
    ("qwen3", {"rope_parameters": {**SCALINGS["yarn"], **THETA}}),
    ("smollm3", {"rope_parameters": {**SCALINGS["linear"], **THETA}, **WINDOW, "sliding_window": 4}),
    ("mistral", {"sliding_window": 2, "head_dim": 14}),
    ("qwen2", {**WINDOW, "sliding_window": 5, "max_window_layers": 1}),
    ("gpt2", {"activation_function": "relu", "n_inner": None}),
]


def one_by_one(model, ids, starts):
    """transformers' logits of each document run alone, at their places in the rows."""
    rows = []
    for row, firsts in zip(ids, starts.tolist(), strict=True):
        spans = zip(firsts, [*firsts[1:], len(row)], strict=True)
        parts = [row[None, first:end] for first, end in spans if end > first]
        rows.append(torch.cat([model(input_ids=part, use_cache=False).logits for part in parts], 1))
    return torch.cat(rows)


def check_packed(model, logit_tolerance=1e-5, gradient_tolerance=1e-6, theirs=one_by_one, kernels=()):
    decoder = our_model(model)
    ids, targets = batch(decoder.arch.vocab_size)
    expected = theirs(model, ids, STARTS)
    logits = decoder(ids, documents=STARTS)
    assert (logits - expected).abs().max() <= logit_tolerance
    expected_loss, loss = summed_loss(expected, targets), decoder(ids, targets, documents=STARTS)
    assert abs(loss - expected_loss) <= logit_tolerance * expected_loss
    (loss / 29).backward()
    loss_of = lambda model: summed_loss(theirs(model, ids, STARTS), targets) / 29  # noqa: E731
    check_gradients(decoder, model, loss_of, gradient_tolerance, kernels=kernels)


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_packed_rows_equal_their_documents_alone(family, tied):
    check_packed(hf_model(family, tied))


@pytest.mark.parametrize(("family", "changes"), CHANGED)
def test_packed_rows_with_scaled_ropes_and_windows_equal_their_documents_alone(family, changes):
    check_packed(hf_model(family, False, **changes))


@pytest.mark.parametrize(("family", "changes"), [*((family, {}) for family in FAMILIES), *CHANGED])
def test_packed_rows_equal_their_documents_alone_in_fp64(family, changes):
    model = hf_model(family, True, torch.float64, **changes)
    with without_detours_through_fp32(model):
        check_packed(model, 1e-12, 1e-12)


@pytest.mark.parametrize(
    ("family", "attention"),
    [(family, kind) for family in FAMILIES for kind in ("sdpa", "eager") if (family, kind) != ("gemma2", "sdpa")],
)
def test_packed_rows_equal_transformers_own(family, attention):
    """It finds the documents by positions that restart, and masks the rest."""

    def packed(model, ids, starts):
        positions = find_documents(starts, ids.shape[1]).positions_BT
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits

    model = hf_model(family, True)
    model.set_attn_implementation(attention)
    check_packed(model, theirs=packed, kernels=() if family == "gemma2" else ("sdpa",))  # its sdpa has no soft cap


@pytest.mark.parametrize(("family", "changes"), [*((family, {}) for family in FAMILIES), *CHANGED[2:4]])
def test_one_token_changes_its_own_document_and_nothing_else_bit_for_bit(family, changes):
    decoder = our_model(hf_model(family, False, **changes))
    ids, starts = batch(decoder.arch.vocab_size, 3, 17)[0], torch.tensor([[0, 4, 11]] * 3)
    before = decoder(ids, documents=starts)
    ids[1, 5] = (ids[1, 5] + 1) % decoder.arch.vocab_size
    # a token that goes to another expert moves the rows of all that go there, and some CPUs round a row by its position
    rounding = 1e-5 if family in ("qwen3_moe", "mixtral") else 0.0
    changed = ((decoder(ids, documents=starts) - before).abs() > rounding).any(-1)
    reach = 6 if decoder.arch.window != 2 else 4  # three layers of a window of two
    assert changed[1, 5 : 5 + reach].all() and changed.sum() == reach


@pytest.mark.parametrize("family", FAMILIES)
def test_no_gradient_crosses_a_border(family):
    decoder = our_model(hf_model(family, False))
    ids = torch.arange(10, 27)[None]
    targets = torch.full_like(ids, -100)
    targets[0, 9] = 3
    decoder(ids, targets, documents=torch.tensor([[0, 4, 12]])).backward()
    gradient = decoder.model.embed_tokens.weight.grad
    assert gradient.abs().sum(-1).nonzero().flatten().tolist() == [*range(14, 20)], "tokens 4 to 9 of the row"


class RunningOn(Documents):
    """A mistake: positions that do not restart."""

    @property
    def positions_BT(self):
        return torch.arange(self.first_BT.shape[1]).expand_as(self.first_BT)


def running_on(starts, length, _offset):
    return RunningOn(**vars(find_documents(starts, length)))


def without_borders(starts, length, _offset):
    """A mistake: attention over the whole row."""
    found = find_documents(starts, length)
    nowhere = torch.zeros_like(found.first_BT)
    return dataclasses.replace(found, starts_BM=torch.zeros_like(starts[:, :1]), first_BT=nowhere)


@pytest.mark.parametrize(("family", "mistake"), [*((f, without_borders) for f in FAMILIES), ("gpt2", running_on)])
def test_these_tests_see_a_leak_and_positions_that_run_on(family, mistake):
    """Rotary positions are relative: inside a document they are the same wherever it begins, but for rounding."""
    with mock.patch("windlass.model.transformer.find_documents", mistake), pytest.raises(AssertionError):
        check_packed(hf_model(family, True), 1e-2, 1e-2)
