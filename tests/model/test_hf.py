"""Weights from and to Hugging Face directories: nothing lost, nothing changed, every bad directory named."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.model.tiny import CASES, SCALINGS, batch, hf_model, our_model
from tests.model.whole.sharded import load_sharded
from windlass.errors import UserError
from windlass.model.config import ModelConfig, architecture_from_hf
from windlass.model.families.family_table import FAMILIES
from windlass.model.hf import check_weights, load_weights, save_weights
from windlass.model.open_config import architecture_of, read_hf_config
from windlass.model.transformer import Decoder


def save_theirs(path, family, tied, dtype=torch.float32, shard_size="5GB", **changes):
    model = hf_model(family, tied, dtype, **changes)
    model.save_pretrained(path, max_shard_size=shard_size)
    return model


def load_ours(path, dtype=torch.float32, **changes):
    arch = architecture_of(ModelConfig(**{"from": str(path)}, **changes))
    with torch.device("meta"):
        decoder = Decoder(arch).to(dtype)
    decoder.to_empty(device="cpu")
    decoder.tie()
    for parameter in decoder.parameters():
        parameter.data.fill_(torch.nan)
    load_weights(path, arch, dict(decoder.named_parameters()))
    return decoder


def tensors_of(path):
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("family", "tied"), CASES)
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_loaded_logits_equal_transformers(tmp_path, family, tied, shard_size):
    model = save_theirs(tmp_path, family, tied, shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "20KB")
    decoder = load_ours(tmp_path)
    ids = batch(211)[0]
    with torch.no_grad():
        assert (decoder(ids) - model(input_ids=ids).logits).abs().max() <= 1e-5
    assert decoder.model.embed_tokens.weight[211:].count_nonzero() == 0
    assert decoder.lm_head.weight[211:].count_nonzero() == 0


def test_every_family_is_among_the_cases():
    assert {family for family, _ in CASES} == set(FAMILIES)


@pytest.mark.parametrize(("family", "tied"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_changes_no_byte(tmp_path, family, tied, dtype):
    save_theirs(tmp_path / "in", family, tied, dtype)
    decoder = load_ours(tmp_path / "in")  # fp32 masters of bf16 weights come back exactly
    save_weights(tmp_path / "out", decoder.arch, decoder.named_parameters(), dtype, max_shard_bytes=20_000)
    before, after = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype == dtype
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert again.dtype == dtype
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    ids = batch(211)[0]
    with torch.no_grad():
        assert torch.equal(again.eval()(input_ids=ids).logits, original.eval()(input_ids=ids).logits)


WINDOW = {"use_sliding_window": True, "sliding_window": 5}
CONFIGS = [
    *((family, tied, {}) for family, tied in CASES),
    *(("llama", False, {"rope_parameters": {**SCALINGS[kind], "rope_theta": 500.0}}) for kind in SCALINGS),
    ("mistral", False, {"sliding_window": None}),
    ("qwen2", False, {**WINDOW, "max_window_layers": 1}),
    ("qwen3", False, {**WINDOW, "max_window_layers": 0, "layer_types": ["sliding_attention"] * 3}),
    ("smollm3", True, {**WINDOW, "no_rope_layers": [1, 0, 1]}),
]


@pytest.mark.parametrize(("family", "tied", "changes"), CONFIGS)
def test_our_config_json_is_theirs_to_transformers(tmp_path, family, tied, changes):
    model = save_theirs(tmp_path / "in", family, tied, **changes)
    decoder = load_ours(tmp_path / "in")
    save_weights(tmp_path / "out", decoder.arch, decoder.named_parameters(), torch.float32)
    theirs, ours = model.config, AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    skipped = [
        "_name_or_path",
        "transformers_version",
        "_sliding_window_pattern",
        "sliding_window_pattern",
    ]  # layer_types rules
    for name, value in theirs.to_dict().items():
        if name not in skipped and not (name in ("n_inner", "head_dim") and value is None):
            assert ours.to_dict()[name] == value, name
    assert architecture_from_hf(read_hf_config(tmp_path / "out")) == decoder.arch
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2 and generation["bos_token_id"] == 1 and generation["pad_token_id"] == 0


def test_shards_respect_the_limit_and_the_index_is_true(tmp_path):
    decoder = our_model(hf_model("qwen3", False))
    save_weights(tmp_path, decoder.arch, decoder.named_parameters(), torch.float32, max_shard_bytes=30_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == sorted(set(index["weight_map"].values()))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    total = 0
    for file in files:
        tensors = load_file(file)
        assert {name for name, where in index["weight_map"].items() if where == file.name} == set(tensors)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 30_000 or len(tensors) == 1
        total += size
    assert index["metadata"]["total_size"] == total


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("world", [2, 3])
def test_shards_are_read_from_their_own_rows(ranks, tmp_path, family, world):
    save_theirs(tmp_path / "in", family, True)
    expected = dict(load_ours(tmp_path / "in").named_parameters())
    for state in ranks.run(world, load_sharded, str(tmp_path / "in"), str(tmp_path / "out")):
        assert state.keys() == expected.keys()
        for name, tensor in state.items():
            assert torch.equal(tensor, expected[name]), name
    before, after = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_part_of_a_model_takes_its_tensors_and_a_tied_head_its_embedding(tmp_path):
    save_theirs(tmp_path, "gpt2", True)
    whole = load_ours(tmp_path)
    stage = Decoder(whole.arch, range(2, 3), first=False, last=True)
    load_weights(tmp_path, whole.arch, dict(stage.named_parameters()))
    assert torch.equal(stage.lm_head.weight, whole.model.embed_tokens.weight)
    assert torch.equal(stage.blocks[0].self_attn.k_proj.weight, whole.blocks[2].self_attn.k_proj.weight)


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen3", False), ("gpt2", True)])
def test_rows_that_a_base_has_not_are_the_mean_of_those_that_it_has(tmp_path, family, tied):
    theirs = save_theirs(tmp_path, family, tied)
    old = theirs.config.vocab_size
    ours = load_ours(tmp_path, vocab_size=old + 3)
    pairs = (ours.model.embed_tokens, theirs.get_input_embeddings()), (ours.lm_head, theirs.get_output_embeddings())
    for mine, whole in ((mine.weight, whole.weight) for mine, whole in pairs):
        assert torch.equal(mine[:old], whole) and not mine[old + 3 :].any() and len(mine) > old + 3
        torch.testing.assert_close(mine[old : old + 3], whole.double().mean(0).float().expand(3, -1), rtol=0, atol=1e-7)
    head = ours.lm_head.weight
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": theirs.get_output_embeddings().weight.clone()}))
    assert torch.equal(load_ours(tmp_path, vocab_size=old + 3).lm_head.weight, head), (
        "a copy of a tied end is one still"
    )
    rewrite(
        tmp_path,
        lambda tensors: tensors.update({next(n for n in tensors if "embed" in n or "wte" in n): head[:9].clone()}),
    )
    with pytest.raises(UserError, match="another shape"):
        check_weights(tmp_path, ours.arch)


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_files_of_the_bare_model_with_constants_are_understood(tmp_path):
    """As openai-community/gpt2 is stored: no `transformer.` prefix, causal masks beside the weights."""
    save_theirs(tmp_path, "gpt2", True)
    expected = dict(load_ours(tmp_path).named_parameters())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 40, 40)
    save_file(tensors, tmp_path / "model.safetensors")
    for name, parameter in load_ours(tmp_path).named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_headers_alone_show_what_loading_would_refuse(tmp_path):
    save_theirs(tmp_path, "llama", False)
    arch = architecture_of(ModelConfig(**{"from": str(tmp_path)}))
    check_weights(tmp_path, arch)
    rewrite(tmp_path, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(UserError, match=r"1 tensors are missing: model\.norm\.weight"):
        check_weights(tmp_path, arch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"1 tensors are missing: model\.norm\.weight"),
        (lambda t: t.update(extra=torch.ones(2)), r"1 tensors are unexpected: extra"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(47)}),
            r"1 tensors have another shape: model\.norm\.weight \(47,\), not \(48,\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}),
            r"1 tensors are not in floating point: model\.norm\.weight \(I8\)",
        ),
    ],
    ids=["missing", "unexpected", "shape", "quantised"],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, message):
    save_theirs(tmp_path, "llama", False)
    rewrite(tmp_path, change)
    with pytest.raises(UserError, match=message):
        load_ours(tmp_path)


def test_a_truncated_file_is_named(tmp_path):
    save_theirs(tmp_path, "llama", False)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors: (.|\n)*as long as its header says"):
        load_ours(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    save_theirs(tmp_path, "llama", False, shard_size="20KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(UserError, match=rf"1 of \d+ weight files are missing: {gone.name}"):
        load_ours(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "[" * 100_000])
def test_a_damaged_index_is_named(tmp_path, content):
    save_theirs(tmp_path, "llama", False, shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match="the index is JSON with a `weight_map`"):
        load_ours(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/model.safetensors", 3])
def test_an_index_that_leads_out_of_the_directory_is_named(tmp_path, name):
    inside = tmp_path / "inside"
    inside.mkdir()
    save_theirs(tmp_path, "llama", False)
    (inside / "config.json").write_text((tmp_path / "config.json").read_text())
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="are in its own directory") as caught:
        load_ours(inside)
    assert str(inside / "model.safetensors.index.json") in caught.value.given and repr(name) in caught.value.given


def test_a_git_lfs_pointer_is_named_with_the_way_out(tmp_path):
    save_theirs(tmp_path, "llama", False)
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 1234567890\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(UserError, match=r"model\.safetensors is a git-LFS pointer") as caught:
        load_ours(tmp_path)
    assert "git lfs pull" in caught.value.change and "hf download" in caught.value.change


def test_weights_are_as_readable_as_the_other_files(tmp_path):
    decoder = our_model(hf_model("llama", True))
    before = os.umask(0o027)
    try:
        save_weights(tmp_path, decoder.arch, decoder.named_parameters(), torch.float32, max_shard_bytes=30_000)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


def test_pickled_weights_are_refused_with_the_way_out(tmp_path):
    save_theirs(tmp_path, "llama", False)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"only pickled weights: pytorch_model\.bin\n(.|\n)*save_pretrained"):
        load_ours(tmp_path)


def test_a_directory_without_weights_is_named(tmp_path):
    save_theirs(tmp_path, "llama", False)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_ours(tmp_path)


def test_weights_are_never_written_beside_older_ones(tmp_path):
    decoder = our_model(hf_model("llama", True))
    save_weights(tmp_path, decoder.arch, decoder.named_parameters(), torch.float32)
    with pytest.raises(UserError, match=r"already holds weights: model\.safetensors\n"):
        save_weights(tmp_path, decoder.arch, decoder.named_parameters(), torch.float32)


def test_a_rank_that_does_not_write_leaves_nothing(tmp_path):
    decoder = our_model(hf_model("llama", True))
    save_weights(tmp_path / "out", decoder.arch, decoder.named_parameters(), torch.float32, write=False)
    assert not (tmp_path / "out").exists()


def test_an_incomplete_model_is_never_written(tmp_path):
    decoder = our_model(hf_model("llama", True))
    some = [item for item in decoder.named_parameters() if item[0] != "model.norm.weight"]
    with pytest.raises(AssertionError, match=r"never came: \['model.norm.weight'\]"):
        save_weights(tmp_path, decoder.arch, some, torch.float32)
    assert not (tmp_path / "config.json").exists()
