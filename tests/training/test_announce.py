"""What is logged and written before step 1."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests import tiny
from tests.parallel.tiny import each, make_program
from tests.training.runs.resuming import EXPERTS
from windlass.model.config import ModelConfig
from windlass.optim.config import OptimConfig
from windlass.optim.elementwise import Storage
from windlass.optim.optimizer import make_optimizer
from windlass.training.announce import (
    describe_layout,
    describe_load,
    describe_memory,
    describe_nulls,
    describe_sparse,
    describe_vocabulary,
)

ON_TOP = "; activations and what ranks gather come on top"
MEMORY = f"142.3 KiB on rank 0 = 16 bytes per trained parameter: weights 4, gradients 4, optimizer states 8.01{ON_TOP}"


def test_the_run_directory_holds_recipe_resolved_settings_and_the_first_event(run):
    from windlass.config import check_recipe
    from windlass.recipe import parse_yaml

    resolved = (run / "resolved.yaml").read_text()
    assert "# layout: replicate 1 x shard 2, zero 3" in resolved and "# global batch: 8 sequences = 2" in resolved
    assert check_recipe(parse_yaml(resolved, "resolved.yaml")).run.steps == tiny.STEPS, "it loads as a recipe again"
    inside = (run / "checkpoints" / "step-00000010" / "resolved.yaml").read_text()
    for text in (resolved, inside):
        assert "# model rms_norm_eps: 1e-06\n" in text, "fields that the recipe leaves to the family"
    assert (run / "recipe.yaml").exists() and (run / "logs" / "rank-1.log").exists()
    first = tiny.lines(run)[0]
    assert (first["kind"], first["step"]) == ("start", 0)
    assert first["derived"]["parameters"].endswith("(16,184)")
    assert first["derived"]["attention"] == "flash for CPU"
    assert first["derived"]["memory"] == MEMORY
    assert first["baselines"] == {}, "6 sequences are not the set that they are fitted for"
    assert first["provenance"]["hosts"]


def held(precision, adapter=None, world=1):
    program = make_program(world, shard=world, policy="bf16", precision=precision, adapter=adapter)
    optimizer = make_optimizer(program.records(), OptimConfig(), storage=Storage(states=torch.bfloat16))
    return describe_memory(program.records(), optimizer.state_tensors().values())


def test_what_a_parameter_keeps_is_listed_by_kind(ranks):
    calls = [partial(held, {}), partial(held, {"gradients": "bf16"}), partial(held, {}, {"rank": 2})]
    (plain, narrow, adapted) = ranks.run(1, each, *calls)[0]
    assert plain.endswith(
        f"bytes per trained parameter: weights 4, copies for products 2, gradients 4, optimizer states 4.01{ON_TOP}"
    )
    assert narrow.endswith(f"weights 4, copies for products 2, gradients 2, optimizer states 4.01{ON_TOP}")
    base, trained = adapted.split(" of frozen weights, and ")
    assert re.fullmatch(r"[0-9.]+ KiB", base) and trained.partition(" on rank 0 = ")[2] == (
        f"14.1 bytes per trained parameter: weights 4, copies for products 2, gradients 4, optimizer states 4.08{ON_TOP}"
    ), "what the adapter trains, alone"
    whole, half = (float(one.split(" ")[0]) for one in (plain, ranks.run(2, held, {}, None, 2)[0]))
    assert half < 0.6 * whole


def test_a_null_that_no_field_of_the_family_knows_is_left_out_and_announced():
    sizes = {key: value for key, value in tiny.MODEL.items() if key != "family"}
    given = ModelConfig(family="qwen3", unsloth_fixed=None, sliding_window=None, **sizes)
    assert given.architecture(300) == ModelConfig(family="qwen3", **sizes).architecture(300)
    assert describe_nulls(given, "qwen3") == "model.unsloth_fixed: null (qwen3 has no such field known here)"
    known = ModelConfig(family="mistral", sliding_window=None, **sizes)
    assert known.architecture(300).window is None and describe_nulls(known, "mistral") == ""
    assert ModelConfig(family="mistral", **sizes).architecture(300).window == 4096


@pytest.mark.parametrize("compiled", [False, True])
def test_the_line_of_experts_says_what_of_their_layers_is_compiled(tmp_path, compiled):
    config = tiny.recipe(tmp_path, model=EXPERTS, parallel={"compile": compiled})
    said = describe_sparse(config, config.model.architecture(300))
    assert said.startswith("2 of 6 in 2 of 2 layers, ")
    assert said.endswith("; of their layers attention alone is compiled") == compiled


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def line(base, blocks=2, **parallel):
    config = tiny.recipe(base, parallel=parallel, model={"num_hidden_layers": blocks, **HEADS})
    return describe_layout(config, config.parallel.layout(4), config.model.architecture(300), 4)


def test_the_line_names_the_axes_the_blocks_of_each_rank_and_the_idle_share(tmp_path):
    assert line(tmp_path, shard=4) == "replicate 1 x shard 4, zero 3"
    assert line(tmp_path, context=2) == "replicate 1 x shard 2 x context 2, zero 3, allgather"
    layout = line(tmp_path, context=2, tp=2, context_kind="ulysses")
    assert layout == "replicate 1 x shard 1 x context 2 x tp 2, zero 3, ulysses"
    assert line(tmp_path, tp=2, shard=2) == "replicate 1 x shard 2 x tp 2, zero 3"
    assert line(tmp_path, pp=2, tp=2).startswith("pp 2 x replicate 1 x shard 1 x tp 2, zero 1; 1f1b, blocks 0 | 1; ")
    assert line(tmp_path, pp=2) == "pp 2 x replicate 1 x shard 2, zero 1; 1f1b, blocks 0 | 1; idle 20.0% of a step"
    layout = line(tmp_path, blocks=5, pp=2, zero=0, schedule="zbv")
    assert layout == (
        "pp 2 x replicate 2 x shard 1, zero 0; zbv, blocks 0, 4 | 1, 2-3; 1f1b would be idle for 20.0% of a step"
    )


@pytest.mark.parametrize(
    ("threads", "load", "cores", "is_busy"),
    [(2, 9.6, 2, True), (1, 9.6, 2, False), (2, 1.9, 2, False), (2, None, 2, False), (2, 9.6, None, False)],
)
def test_a_busy_host_is_named_where_a_rank_has_several_threads(threads, load, cores, is_busy):
    found = describe_load(threads, load, cores)
    assert len(found) == is_busy
    assert all(line.startswith("this host is busy: 9.6 threads of other programs for 2 cores. OMP_") for line in found)


@pytest.mark.parametrize(("size", "said"), [(2048, "2048"), (300, "300, padded to 384")])
def test_a_vocabulary_is_padded_where_it_grows(size, said):
    padded = -(-size // 128) * 128
    architecture = SimpleNamespace(vocab_size=size, padded_vocab_size=padded)
    run = SimpleNamespace(architecture=architecture, config=SimpleNamespace(model=None), start_step=3)
    assert describe_vocabulary(run) == said
