"""Padded batches: the loss and every gradient of the rows run alone, and transformers' with its mask; greedy text too.

Padding behind a row needs nothing but targets of -100, since nobody sees what comes later. Padding before it is a document
of its own.
"""

import pytest
import torch

from tests.model.tiny import FAMILIES, SCALINGS, batch, hf_model, our_model
from tests.model.whole.parity import check_gradients, summed_loss, tensor_maxima
from windlass.model.cache import KVCache

LENGTH = 17
LENGTHS = (17, 9, 12)
PAD = 0
WINDOW = {"use_sliding_window": True, "sliding_window": 4}
CASES = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"rope_parameters": {**SCALINGS["llama3"], "rope_theta": 500.0}}),
    ("smollm3", {**WINDOW, "rope_parameters": {**SCALINGS["yarn"], "rope_theta": 500.0}}),
]
LEFT = {"left": (0, 8, 5), "right": (0, 0, 0), "both": (0, 3, 4)}  # tokens of padding before each row


def rows_alone():
    """Rows of different lengths, and targets with holes of their own; the padding token occurs inside of one, too."""
    ids, targets = batch(211, len(LENGTHS), LENGTH)
    targets[2, 2:6] = ids[2, 3:7]  # the last row of `batch` counts nothing
    return [(row[:length], target[:length]) for row, target, length in zip(ids, targets, LENGTHS, strict=True)]


def padded(side):
    """(ids, targets, documents or None, mask): rows filled to one length, and a row that is nothing but padding."""
    ids, targets = torch.full((4, LENGTH), PAD), torch.full((4, LENGTH), -100)
    mask, starts = torch.zeros(4, LENGTH, dtype=torch.long), torch.full((4, 2), LENGTH)
    starts[:, 0] = 0
    for index, ((row, target), left) in enumerate(zip(rows_alone(), LEFT[side], strict=True)):
        place = slice(left, left + len(row))
        ids[index, place], targets[index, place], mask[index, place] = row, target, 1
        starts[index, 1] = left or LENGTH
    return ids, targets, None if side == "right" else starts, mask


@pytest.mark.parametrize("side", LEFT)
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_padding_changes_neither_loss_nor_any_gradient(family, changes, side):
    decoder = our_model(hf_model(family, True, torch.float64, **changes))
    alone = sum(decoder(row[None], target[None]) for row, target in rows_alone())
    alone.backward()
    expected = {name: parameter.grad.clone() for name, parameter in decoder.named_parameters()}
    decoder.zero_grad()
    ids, targets, documents, _ = padded(side)
    loss = decoder(ids, targets, documents=documents)
    loss.backward()
    assert abs(loss - alone) <= 1e-13 * alone
    largest = tensor_maxima(expected, family)
    for name, parameter in decoder.named_parameters():
        assert (parameter.grad - expected[name]).abs().max() <= 1e-13 * largest[name], name


@pytest.mark.parametrize("side", LEFT)
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches_equal_transformers_with_its_mask(family, side):
    model = hf_model(family, True)
    decoder = our_model(model)
    ids, targets, documents, mask = (None if x is None else x[:3] for x in padded(side))
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def theirs(model):
        return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits

    logits, expected = decoder(ids, documents=documents), theirs(model)
    assert ((logits - expected) * mask[:, :, None]).abs().max() <= 1e-5
    loss, expected_loss = decoder(ids, targets, documents=documents), summed_loss(expected, targets)
    assert abs(loss - expected_loss) <= 1e-5 * expected_loss
    (loss / 29).backward()
    check_gradients(decoder, model, lambda model: summed_loss(theirs(model), targets) / 29)


@pytest.mark.parametrize("side", LEFT)
def test_what_the_padding_holds_does_not_matter(side):
    decoder = our_model(hf_model("qwen3", False))
    ids, targets, documents, mask = padded(side)
    loss = decoder(ids, targets, documents=documents)
    assert torch.equal(decoder(torch.where(mask == 1, ids, 77), targets, documents=documents), loss)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_padding_before_a_row_that_is_not_declared_is_seen(family):
    """The mistake that the tests above would find."""
    decoder = our_model(hf_model(family, False))
    ids, targets, documents, _ = padded("left")
    given, untold = decoder(ids, targets, documents=documents), decoder(ids, targets)
    assert abs(given - untold) > 1e-4 * given


def test_a_batch_of_nothing_but_padding_is_zero_and_finite():
    decoder = our_model(hf_model("llama", True))
    loss = decoder(torch.full((2, 5), PAD), torch.full((2, 5), -100), documents=torch.zeros(2, 1, dtype=torch.long))
    loss.backward()
    assert loss == 0 and all(parameter.grad.count_nonzero() == 0 for parameter in decoder.parameters())


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_greedy_text_of_prompts_of_different_lengths_equals_transformers_padded_batch(family, changes):
    """We generate each prompt alone, with a cache and without; transformers all of them, padded before."""
    model, new = hf_model(family, False, **changes), 12
    decoder = our_model(model)
    ids, _, _, mask = (None if x is None else x[:3] for x in padded("left"))
    tokens = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": PAD}
    with torch.no_grad():
        theirs = model.generate(ids, attention_mask=mask, **tokens)[:, LENGTH:]
        for (prompt, _), expected in zip(rows_alone(), theirs, strict=True):
            cache = KVCache(decoder.arch, 1, len(prompt) + new, dtype=torch.float32)
            text, cached, fresh = prompt[None], prompt[None], prompt[None]
            for _ in range(new):
                text = torch.cat((text, choose(decoder(text), model)), 1)
                fresh = choose(decoder(fresh, cache=cache), model)
                cached = torch.cat((cached, fresh), 1)
            assert text[0, len(prompt) :].tolist() == cached[0, len(prompt) :].tolist() == expected.tolist()


def choose(logits, model):
    last = logits[:, -1].clone()
    last[:, model.config.eos_token_id] = -torch.inf  # as min_new_tokens does
    return last.argmax(-1, keepdim=True)
