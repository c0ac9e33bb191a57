"""What ranks do for a proof: masks and borders that look at the row alone."""

from pathlib import Path

import torch

import windlass
from windlass.data.batch_fields import NOT_COUNTED
from windlass.model.config import ModelConfig
from windlass.proof import watch as proof


def rows(num_rows=40, length=13):
    ids = torch.randint(0, 269, (num_rows, length), generator=torch.Generator().manual_seed(1))
    return ids, ids.roll(-1, 1)


def test_masks_are_uneven_and_the_same_wherever_a_row_lies():
    ids, targets = rows()
    masked = proof.take_targets(ids, targets)
    counts = (masked != NOT_COUNTED).sum(1)
    assert counts.min() == 0 and counts.max() == 13 and len(counts.unique()) > 4
    assert (masked[counts > 0] == targets[counts > 0])[masked[counts > 0] != NOT_COUNTED].all()
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(3))
    assert torch.equal(proof.take_targets(ids[order], targets[order]), masked[order])
    assert torch.equal(proof.take_targets(ids[7:9], targets[7:9]), masked[7:9])
    ignored = torch.full_like(targets, NOT_COUNTED)
    assert torch.equal(proof.take_targets(ids, ignored), ignored)


def test_every_border_of_the_vocabulary_is_met_as_input_and_as_target():
    arch = ModelConfig(family="gpt2", n_embd=6, n_layer=1, n_head=2, n_positions=19, vocab_size=269).architecture()
    assert arch.padded_vocab_size == 384
    assert proof.vocabulary_borders(arch, 1) == [0, 268] and proof.vocabulary_borders(arch, 2) == [0, 191, 192, 268]
    assert proof.vocabulary_borders(arch, 4) == [0, 95, 96, 191, 192, 268], "the last rank has padding only"
    padded = dict(family="smollm3", hidden_size=12, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    padded = ModelConfig(**padded, num_key_value_heads=2, vocab_size=269, pad_token_id=7).architecture()
    assert proof.vocabulary_borders(padded, 1) == [0, 268, 7]
    ids, targets = rows()
    borders = proof.vocabulary_borders(arch, 4)
    odd = proof.odd({"input_ids": ids, "targets": targets}, borders)
    assert set(borders) <= set(odd["input_ids"].flatten().tolist()) and set(borders) <= set(
        odd["targets"].flatten().tolist()
    )
    assert ((odd["targets"] == NOT_COUNTED) == (proof.take_targets(ids, targets) == NOT_COUNTED)).all()
    assert (odd["input_ids"] == ids).float().mean() > 0.7 and ids.equal(rows()[0]), "most stay, and what was given too"
    joined = odd["targets"][:, :-1] == odd["input_ids"][:, 1:]
    assert joined[odd["targets"][:, :-1] != NOT_COUNTED].all(), "a target is still the next token"
    one = proof.odd({"input_ids": ids[7:9], "targets": targets[7:9]}, borders)
    assert all(torch.equal(one[name], odd[name][7:9]) for name in one)


def test_the_package_patches_nothing():
    sources = [path for path in Path(windlass.__file__).parent.rglob("*.py") if "__pycache__" not in path.parts]
    assert len(sources) > 150
    assert [path.name for path in sources if "mock" in path.read_text() or "monkeypatch" in path.read_text()] == []
