"""The oracle imports nothing of ours, and its float64 has none of transformers' float32 detours."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import cases
from windlass.proof import reference, reference_adapter, reference_preference, reference_routers

PARTS = (reference_adapter, reference_preference, reference_routers)


def test_it_imports_torch_and_transformers_and_none_of_ours():
    trees = [ast.parse(Path(module.__file__).read_text()) for module in (reference, *PARTS)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)} - {part.__name__ for part in PARTS}
    assert {name.split(".")[0] for name in names} <= {
        "collections",
        "contextlib",
        "dataclasses",
        "fnmatch",
        "pathlib",
        "typing",
        "torch",
        "transformers",
    }


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2", "qwen3_moe"])
def test_float64_differs_from_float32_by_float32s_rounding_and_not_from_itself(tmp_path, family):
    directory = cases.write_model(tmp_path, family, tied=True)
    ids = cases.global_batches()[0][0]
    with torch.no_grad():
        exact = reference.load_model(directory, torch.float64)(input_ids=ids, use_cache=False).logits
        rounded = reference.load_model(directory, torch.float32)(input_ids=ids, use_cache=False).logits
        from transformers import AutoModelForCausalLM

        plain = {"experts_implementation": "eager"} if family == "qwen3_moe" else {}  # grouped products have no float64
        unpatched = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, **plain)(input_ids=ids).logits
    assert exact.dtype == torch.float64
    assert (exact - rounded).abs().max() < 2e-5
    detour = (exact - unpatched).abs().max()
    assert detour < 1e-5 and (family == "gpt2" or detour > 1e-9), "what the patch removes"


def test_the_clip_and_the_decay_are_torchs_own(tmp_path):
    directory = cases.write_model(tmp_path, "gpt2", tied=True)
    batches = cases.global_batches()
    plain = reference.train_reference(directory, batches, torch.float64, cases.SETTINGS)
    loose = replace(cases.SETTINGS, max_norm=1e9, weight_decay=0.0)
    free = reference.train_reference(directory, batches, torch.float64, loose)
    assert plain.norms[0] == free.norms[0] > cases.SETTINGS.max_norm, "the norm is the one before the clip"
    assert plain.losses[0] == free.losses[0] and plain.losses[2] != free.losses[2]


def test_what_is_scored_is_summed_before_the_first_step_and_after_the_last_and_teaches_nothing(tmp_path):
    directory = cases.write_model(tmp_path, "gpt2", tied=True, resid_pdrop=0.5)  # no dropout while scoring
    batches = cases.global_batches()
    first, later = batches[0], batches[1]
    count = int((first[1] != -100).sum())
    torch.manual_seed(1)
    plain = reference.train_reference(directory, [first, first], torch.float64, cases.SETTINGS)
    torch.manual_seed(1)
    scored = reference.train_reference(directory, [first, first], torch.float64, cases.SETTINGS, [first, later])
    before, after = scored.evaluations
    assert plain.evaluations == [0, 0] and scored.losses[0] == plain.losses[0] and after < before
    undropped = reference.load_model(directory, torch.float64).eval()
    nats = 0.0
    for ids, targets in (first, later):
        out = undropped(input_ids=ids, use_cache=False).logits.detach().log_softmax(-1)
        kept = targets != -100
        nats -= float(out[kept].gather(-1, targets[kept][:, None]).sum())
    assert before == pytest.approx(nats, rel=1e-12) and before > count


@pytest.mark.parametrize("kind", ["default", "llama3", "yarn"])
def test_scaled_ropes_are_exact_too(tmp_path, kind):
    from transformers import LlamaConfig, LlamaForCausalLM

    from windlass.training.start.open_saved import open_saved

    rope = {"rope_type": kind, "rope_theta": 10000.0}
    if kind != "default":
        rope |= {"factor": 4.0, "original_max_position_embeddings": 16}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    sizes = {**cases.SIZES["llama"], "vocab_size": cases.VOCABULARY, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope)).save_pretrained(tmp_path)
    ids = cases.global_batches()[0][0]
    with torch.no_grad():
        theirs = reference.load_model(tmp_path, torch.float64)(input_ids=ids).logits
        ours = open_saved(tmp_path, dtype=torch.float64).model(ids)
    assert (theirs - ours).abs().max() < 1e-12
