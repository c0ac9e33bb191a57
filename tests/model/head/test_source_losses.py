"""The loss of each source: sums of the nats that the head computes, by the rows' sources."""

import pytest
import torch
from torch.nn import functional

from windlass.errors import UserError
from windlass.model.head.head import Head
from windlass.model.head.source_losses import SourceLosses

SOURCES = torch.tensor([[False, True, False], [True, False, False], [False, True, False], [True, False, False]])


def made(seed):
    torch.manual_seed(seed)
    head = Head(16, 50, 64).double()
    hidden_BTD = torch.randn(4, 7, 16, dtype=torch.float64, requires_grad=True)
    targets_BT = torch.randint(50, (4, 7))
    targets_BT[0, :3] = targets_BT[2] = -100
    return head, hidden_BTD, targets_BT


def nats_of(head, hidden_BTD, targets_BT):
    """Each target's, by torch's own cross-entropy."""
    logits = functional.linear(hidden_BTD, head.weight[:50]).flatten(0, 1)
    return functional.cross_entropy(logits, targets_BT.flatten(), reduction="none").view_as(targets_BT)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 28, 100])
@pytest.mark.parametrize("factor", [None, 0.25])
def test_sums_are_those_of_cross_entropy_by_row(chunk_tokens, factor):
    losses, expected_S2 = SourceLosses(), torch.zeros(3, 2, dtype=torch.float64)
    for seed in range(2):  # micro-batches
        head, hidden_BTD, targets_BT = made(seed)
        head.chunk_tokens = chunk_tokens
        bits = None if factor is None else torch.tensor(factor, dtype=torch.float64).view(torch.int64)
        head(hidden_BTD, targets_BT, None, False, bits, losses.of(SOURCES, targets_BT)).backward()
        nats_BT = nats_of(head, hidden_BTD, targets_BT).detach()
        for row, source in enumerate([1, 0, 1, 0]):
            expected_S2[source] += torch.tensor([nats_BT[row].sum(), (targets_BT[row] != -100).sum()])
    assert losses.sums_S2[:, 1].tolist() == [28, 8, 0], "rows 1 and 3; four targets of row 0 and none of row 2; no row"
    torch.testing.assert_close(losses.sums_S2, expected_S2, rtol=1e-12, atol=0)
    losses.begin()
    assert losses.sums_S2 is None


def test_what_is_seen_changes_neither_loss_nor_gradients():
    found = []
    for seen in (None, SourceLosses().of(SOURCES, made(0)[2])):
        head, hidden_BTD, targets_BT = made(0)
        loss = head(hidden_BTD, targets_BT, None, False, None, seen)
        loss.backward()
        found.append((loss, hidden_BTD.grad, head.weight.grad))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_other_rows_than_sources_are_refused():
    with pytest.raises(UserError) as caught:
        SourceLosses().of(SOURCES, made(0)[2][:3])
    assert caught.value.given == "a batch of 3 rows, and `sources` of 4" and "removes `sources`" in caught.value.change


def test_nothing_is_added_without_sources_or_without_gradients():
    losses, targets_BT = SourceLosses(), made(0)[2]
    assert losses.of(None, targets_BT) is None and losses.of(SOURCES, None) is None
    with torch.no_grad():
        assert losses.of(SOURCES, targets_BT) is None
    assert losses.sums_S2 is None
