"""What is run for a proof: masks that look at the row alone, positions, and the names of the oracle's tensors."""

import torch

from windlass.jobs import proof, truth
from windlass.model.config import ModelConfig
from windlass.model.loss import IGNORED


def rows(num_rows=40, length=13):
    ids = torch.randint(0, 269, (num_rows, length), generator=torch.Generator().manual_seed(1))
    return ids, ids.roll(-1, 1)


def test_masks_are_uneven_and_the_same_wherever_a_row_lies():
    ids, targets = rows()
    masked = proof.take_targets(ids, targets)
    counts = (masked != IGNORED).sum(1)
    assert counts.min() == 0 and counts.max() == 13 and len(counts.unique()) > 4
    assert (masked[counts > 0] == targets[counts > 0])[masked[counts > 0] != IGNORED].all()
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(3))
    assert torch.equal(proof.take_targets(ids[order], targets[order]), masked[order])
    assert torch.equal(proof.take_targets(ids[7:9], targets[7:9]), masked[7:9])
    ignored = torch.full_like(targets, IGNORED)
    assert torch.equal(proof.take_targets(ids, ignored), ignored)


def test_every_border_of_the_vocabulary_is_met_as_input_and_as_target():
    arch = ModelConfig(family="gpt2", n_embd=6, n_layer=1, n_head=2, n_positions=19, vocab_size=269).architecture()
    assert arch.padded_vocab_size == 384
    assert proof.borders_of(arch, 1) == [0, 268] and proof.borders_of(arch, 2) == [0, 191, 192, 268]
    assert proof.borders_of(arch, 4) == [0, 95, 96, 191, 192, 268], "the last rank has padding only"
    ids, targets = rows()
    borders = proof.borders_of(arch, 4)
    odd = proof.odd({"input_ids": ids, "targets": targets}, borders)
    assert set(borders) <= set(odd["input_ids"].flatten().tolist()) and set(borders) <= set(
        odd["targets"].flatten().tolist()
    )
    assert ((odd["targets"] == IGNORED) == (proof.take_targets(ids, targets) == IGNORED)).all()
    assert (odd["input_ids"] == ids).float().mean() > 0.7 and ids.equal(rows()[0]), "most stay, and what was given too"
    joined = odd["targets"][:, :-1] == odd["input_ids"][:, 1:]
    assert joined[odd["targets"][:, :-1] != IGNORED].all(), "a target is still the next token"
    one = proof.odd({"input_ids": ids[7:9], "targets": targets[7:9]}, borders)
    assert all(torch.equal(one[name], odd[name][7:9]) for name in one)


def test_positions_begin_anew_at_each_document():
    starts = torch.tensor([[0, 3, 6], [0, 6, 6]])
    assert truth.positions_of(starts, 6).tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]


def test_the_oracles_fused_tensors_are_cut_as_ours():
    arch = ModelConfig(family="gpt2", n_embd=6, n_layer=1, n_head=2, n_positions=9, vocab_size=11).architecture()
    fused = torch.arange(6 * 18.0).view(6, 18)
    ours = truth.by_our_names({"transformer.h.0.attn.c_attn.weight": fused}, arch)
    assert list(ours) == [f"model.layers.0.self_attn.{one}_proj.weight" for one in "qkv"]
    assert torch.equal(torch.cat(list(ours.values())), fused.T)


def test_padded_rows_are_cut_off():
    arch = ModelConfig(family="gpt2", n_embd=6, n_layer=1, n_head=2, n_positions=9, vocab_size=11).architecture()
    held = {"model.embed_tokens.weight": torch.ones(128, 6), "model.norm.weight": torch.ones(6)}
    assert [len(tensor) for tensor in truth.trimmed(held, arch).values()] == [11, 6]


def test_the_model_is_the_same_every_time_and_moved_off_its_beginning(tmp_path):
    from safetensors.torch import load_file

    arch = ModelConfig(family="gpt2", n_embd=6, n_layer=1, n_head=2, n_positions=9, vocab_size=11).architecture()
    for name in "ab":
        torch.manual_seed(ord(name) if name == "c" else 0)
        truth.write_model(tmp_path / name, arch)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(first[name], second[name]) and first[name].dtype == torch.float64 for name in first)
    assert first["transformer.ln_f.bias"].abs().min() > 0
