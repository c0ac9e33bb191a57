"""What a proof is held against: positions, counts, the names of the oracle's tensors, and weights drawn whole."""

import torch

from tests import tiny
from windlass.data.batch_fields import NOT_COUNTED
from windlass.model.architecture import parameter_shapes
from windlass.model.config import ModelConfig
from windlass.proof import reference_run as one_process
from windlass.proof import watch as proof


def test_targets_that_count_are_counted_by_batch():
    batches = [{"targets": torch.tensor([[1, NOT_COUNTED, 2], [NOT_COUNTED] * 3])}, {"targets": torch.tensor([[0]])}]
    assert one_process.counted_per_batch(batches) == [2, 1]


def test_weights_are_drawn_by_the_recipes_seed_in_more_than_one_block(tmp_path):
    arch = ModelConfig(family="gpt2", n_embd=12, n_layer=1, n_head=2, n_positions=9, vocab_size=11).architecture()
    one, again, other = (one_process.drawn(tiny.recipe(tmp_path, run={"seed": seed}), arch) for seed in (4, 4, 5))
    name = "model.layers.0.mlp.up_proj.weight"
    assert one.keys() == parameter_shapes(arch).keys() and one[name].numel() > 3 * proof.DRAWN_BLOCK
    assert torch.equal(one[name], again[name]) and not torch.equal(one[name], other[name])
    blocks = one[name].flatten()[: 2 * proof.DRAWN_BLOCK].view(2, -1)
    assert not torch.equal(*blocks) and 0.7 < float(one[name].std()) / arch.initializer_range < 1.3
    assert one["model.norm.weight"].eq(1).all()


def test_positions_begin_anew_at_each_document():
    starts = torch.tensor([[0, 3, 6], [0, 6, 6]])
    assert one_process.positions_of(starts, 6).tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]


def test_the_oracles_fused_tensors_are_cut_as_ours():
    arch = ModelConfig(family="gpt2", n_embd=6, n_layer=1, n_head=2, n_positions=9, vocab_size=11).architecture()
    fused = torch.arange(6 * 18.0).view(6, 18)
    ours = one_process.by_our_names({"transformer.h.0.attn.c_attn.weight": fused}, arch)
    assert list(ours) == [f"model.layers.0.self_attn.{one}_proj.weight" for one in "qkv"]
    assert torch.equal(torch.cat(list(ours.values())), fused.T)


def test_padded_rows_are_cut_off():
    arch = ModelConfig(family="gpt2", n_embd=6, n_layer=1, n_head=2, n_positions=9, vocab_size=11).architecture()
    held = {"model.embed_tokens.weight": torch.ones(128, 6), "model.norm.weight": torch.ones(6)}
    assert [len(tensor) for tensor in one_process.trimmed(held, arch).values()] == [11, 6]


def test_the_model_is_the_same_every_time_and_moved_off_its_beginning(tmp_path):
    from safetensors.torch import load_file

    arch = ModelConfig(family="gpt2", n_embd=6, n_layer=1, n_head=2, n_positions=9, vocab_size=11).architecture()
    for name in "ab":
        torch.manual_seed(ord(name) if name == "c" else 0)
        one_process.write_model(tmp_path / name, arch)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(first[name], second[name]) and first[name].dtype == torch.float64 for name in first)
    assert first["transformer.ln_f.bias"].abs().min() > 0
