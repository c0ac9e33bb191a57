"""The proxy model has what makes a layout wrong or right, and is small."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.parallel.tiny import num_buckets
from windlass.config import check_recipe, load_recipe
from windlass.model.architecture import parameter_shapes
from windlass.model.attention.context import copies
from windlass.model.config import ModelConfig, architecture_from_hf
from windlass.model.families.family_table import FAMILIES, to_hf
from windlass.model.flops import count_parameters
from windlass.parallel.config import ParallelConfig
from windlass.proof.fold_layout import fold_onto_ranks
from windlass.proof.proxy import LENGTH, VOCABULARY, choose_layers, chunk_of, make_proxy, shrink, write_text
from windlass.recipe import shipped_recipes

SMALL = {
    "run": {"directory": "run", "steps": 9, "tokens_per_step": 4096, "micro_batch": 4},
    "data": {"sources": [{"path": "text"}], "tokenizer": {"train": 500}, "directory": "data", "sequence_length": 64},
}
QWEN2 = {
    "family": "qwen2",
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def cell_of(ranks=8, **parallel):
    return fold_onto_ranks(ParallelConfig(**parallel), ranks, 8).cells[0]


def recipe(model=QWEN2, **sections):
    return check_recipe({**SMALL, "model": model, **sections})


def proxy_of(tmp_path, config, **parallel):
    return make_proxy(config, config.model.architecture(500), cell_of(**parallel), tmp_path)


@pytest.mark.parametrize(("kind", "format"), [("sft", "chat"), ("dpo", "preference")])
def test_the_proxy_model_of_chats_learns_texts_and_that_of_pairs_pairs(tmp_path, kind, format):
    """A layout cuts chats as it cuts texts."""
    data = SMALL["data"] | {"sources": [{"path": "rows.jsonl", "format": format}], "tokenizer": {"from": "t"}}
    config = recipe(QWEN2, data=data, objective={"kind": kind}, run=SMALL["run"] | {"micro_batch": 2})
    proxy = proxy_of(tmp_path, config, shard=2).config
    found = proxy.objective.kind, proxy.data.sources[0].format
    assert found == (("pretrain", "text") if kind == "sft" else ("dpo", "preference"))


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if name != "demo"])
@pytest.mark.parametrize("parallel", [{"shard": 2}, {"pp": 2, "tp": 2, "shard": 2}], ids=str)
def test_shipped_recipes_have_a_small_proxy_model_with_their_features(tmp_path, name, parallel):
    config = load_recipe(name)
    full = config.model.architecture(300)
    proxy = make_proxy(config, full, cell_of(**parallel), tmp_path)
    small = proxy.architecture
    assert count_parameters(small) < 200_000
    kept = (
        "family",
        "tied",
        "activation",
        "layer_norm",
        "qk_norm",
        "qkv_bias",
        "rope_theta",
        "rope_scaling",
        "dropout",
    )
    assert [getattr(small, key) for key in kept] == [getattr(full, key) for key in kept]
    for key in ("window", "window_layers", "unrotated_layers", "pad_token_id"):
        assert bool(getattr(small, key)) == bool(getattr(full, key)), key
    if full.unrotated_layers:
        assert 0 < len(small.unrotated_layers) < small.num_layers
    assert (small.num_heads == small.num_kv_heads) == (full.num_heads == full.num_kv_heads)
    assert proxy.config.data.isolate == config.data.isolate and proxy.config.precision.policy == "fp64"
    proxy.config.check_layout(small)


def test_sizes_are_odd_and_the_vocabulary_divides_by_nothing():
    small = shrink(recipe().model.architecture(500), cell_of(2, shard=2), [0, 5, 11], ParallelConfig())
    assert small.vocab_size == VOCABULARY and all(VOCABULARY % n for n in range(2, 17))
    assert small.intermediate_size % 2 and small.num_layers == 3
    free = recipe({**QWEN2, "family": "qwen3", "head_dim": 16}).model.architecture(500)
    assert shrink(free, cell_of(2, shard=2), [0, 5, 11], ParallelConfig()).hidden_size % 2


@pytest.mark.parametrize(("heads", "kv", "tp", "expected"), [
    (8, 2, 1, (6, 2)), (8, 2, 2, (6, 2)), (12, 4, 4, (12, 4)), (8, 4, 1, (4, 2)), (8, 4, 2, (8, 4)), (8, 8, 1, (3, 3)),
    (8, 8, 2, (4, 4)), (8, 1, 1, (3, 1)), (8, 2, 4, (8, 2)), (8, 1, 2, (6, 1)),
])  # fmt: skip
def test_heads_are_grouped_as_the_models_and_shared_by_tensor_ranks(heads, kv, tp, expected):
    model = {**QWEN2, "num_attention_heads": heads, "num_key_value_heads": kv}
    cell = cell_of(tp=tp, shard=1, ranks=tp)
    small = shrink(recipe(model).model.architecture(500), cell, [0, 1, 2], cell.parallel)
    assert (small.num_heads, small.num_kv_heads) == expected


def test_a_head_that_all_ranks_share_leaves_open_which_one_they_read(tmp_path):
    model = {**QWEN2, "num_attention_heads": 8, "num_key_value_heads": 2}
    for tp, folded in ((4, 4), (8, 2)):
        config = recipe(model, parallel={"tp": tp, "shard": 1})
        architecture = config.model.architecture(500)
        cell = cell_of(tp=folded, shard=1, ranks=folded)
        proxy = make_proxy(config, architecture, cell, tmp_path / str(tp))
        assert proxy.architecture.num_kv_heads == (2 if folded == 4 else 1)
        assert ("which key/value head a tensor rank reads" in " ".join(proxy.unproved)) == (folded == 2)


@pytest.mark.parametrize(("heads", "kv", "ranks", "at_hand", "expected", "times"), [
    (4, 2, 4, 8, (4, 2), 2), (8, 2, 4, 8, (8, 2), 2), (8, 4, 4, 8, (8, 4), 1), (8, 1, 2, 8, (4, 1), 2),
    (12, 3, 2, 8, (12, 3), 2), (4, 2, 4, 2, (6, 3), 2), (8, 8, 2, 8, (2, 2), 1), (4, 2, 2, 8, (4, 2), 1),
])  # fmt: skip
def test_ulysses_copies_heads_in_the_proxy_model_where_it_does_in_the_model(heads, kv, ranks, at_hand, expected, times):
    model = recipe({**QWEN2, "num_attention_heads": heads, "num_key_value_heads": kv}).model.architecture(500)
    whole = ParallelConfig(context=ranks, context_kind="ulysses", shard=1)
    (cell,) = fold_onto_ranks(whole, None, at_hand).cells
    small = shrink(model, cell, [0, 1, 2], whole)
    assert (small.num_heads, small.num_kv_heads) == expected
    assert copies(*expected, cell.layout.context) == times


def test_every_kind_of_layer_is_in_the_proxy_model():
    windowed = {**QWEN2, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 10}
    config = recipe(windowed)
    architecture = config.model.architecture(500)
    layers = choose_layers(config, architecture, cell_of(2, shard=2))
    assert len(layers) == 3 and min(layers) < 10 <= max(layers)
    small = shrink(architecture, cell_of(2, shard=2), layers, ParallelConfig())
    assert 0 < len(small.window_layers) < 3 and small.window == 5
    assert len(choose_layers(config, replace(architecture, num_layers=2), cell_of(2, shard=2))) == 2


def test_a_pipeline_has_more_blocks_than_stages(tmp_path):
    for schedule, blocks in (("1f1b", 3), ("zbv", 5)):
        proxy = proxy_of(tmp_path / schedule, recipe(), pp=2, shard=1, ranks=2, schedule=schedule)
        assert proxy.architecture.num_layers == blocks
        config = proxy.config
        assert config.accumulation(1) == (3 if schedule == "zbv" or schedule == "1f1b" else 4)


def test_groups_by_name_follow_the_layers_that_the_proxy_models_stand_for(tmp_path):
    groups = [
        {"names": ["*norm*"]},
        {"names": ["model.layers.11.*"], "learning_rate_scale": 3.0},
        {"names": ["model.layers.0.*", "model.embed_tokens.weight"], "frozen": True},
    ]
    proxy = proxy_of(tmp_path, recipe(optim={"groups": groups}), shard=2, ranks=2)
    fast, frozen = proxy.config.optim.groups
    assert fast.learning_rate_scale == 3.0 and all(name.startswith("model.layers.2.") for name in fast.names)
    assert frozen.frozen and "model.embed_tokens.weight" in frozen.names
    assert not any("norm" in name for name in [*fast.names, *frozen.names])
    assert "model.layers.0.mlp.up_proj.weight" in frozen.names and len(fast.names) == len(frozen.names) - 1


def test_what_the_layout_cuts_divides_the_sequence(tmp_path):
    for tp, length in ((1, LENGTH), (2, 14), (4, 20)):
        model = {**QWEN2, "num_key_value_heads": 4}
        proxy = proxy_of(tmp_path / str(tp), recipe(model), tp=tp, shard=1, ranks=tp)
        assert proxy.config.data.sequence_length == length


@pytest.mark.parametrize(("expert", "experts"), [(1, 6), (2, 6), (3, 6), (4, 8), (8, 8)])
def test_expert_ranks_divide_the_proxy_models_experts(tmp_path, expert, experts):
    parallel = {"shard": expert, "expert": expert}
    moe = {**QWEN2, "family": "qwen3_moe", "num_experts": 24, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
    proxy = proxy_of(tmp_path, recipe(moe, parallel=parallel), ranks=expert, **parallel)
    assert proxy.architecture.num_experts == experts
    assert any(sentence.startswith("the grouped product of experts") for sentence in proxy.unproved)


PAGES = sorted((Path(__file__).parents[2] / "docs" / "techniques").glob("*.yaml"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_recipe_of_every_technique_has_proxy_models(tmp_path, page):
    config = load_recipe(page)
    model = load_recipe(page.with_name("memory.yaml")).model if config.model.from_ else config.model  # what `base` is
    full = model.architecture(300)
    for number, cell in enumerate(fold_onto_ranks(config.parallel, None, 8).cells):
        proxy = make_proxy(config, full, cell, tmp_path / str(number))
        proxy.config.check_layout(proxy.architecture)  # as each rank asks


def test_what_the_proxy_model_leaves_out_is_said(tmp_path):
    parallel = {"compile": True, "recompute": "selective", "activation_gib": 2.0, "blocks_per_unit": 6, "prefetch": 2}
    proxy = proxy_of(tmp_path, recipe(parallel=parallel), shard=2, ranks=2, **parallel)
    assert [sentence.partition(":")[0] for sentence in proxy.unproved] == [
        "parallel.compile",
        "parallel.activation_gib",
    ]
    ddp = proxy_of(
        tmp_path / "ddp", recipe(parallel={"zero": 0, "replicate": 2}), ranks=2, zero=0, replicate=2, shard=1
    )
    sizes = [8 * math.prod(shape) for shape in parameter_shapes(ddp.architecture).values()]
    assert not ddp.unproved and num_buckets(sizes, ddp.config.parallel.bucket_mib) > 3
    other = proxy_of(tmp_path / "other", recipe(run={**SMALL["run"], "start_from": "elsewhere"}), ranks=2, shard=2)
    assert other.unproved == ("run.start_from: the proxy model begins with weights of its own",)
    left = proxy.config.parallel
    assert (left.recompute, left.blocks_per_unit, left.prefetch, left.compile) == ("selective", 2, 1, False)


def test_the_text_is_the_same_every_time(tmp_path):
    for name in "ab":
        write_text(tmp_path / name)
    files = [sorted(path.read_bytes() for path in (tmp_path / name).iterdir()) for name in "ab"]
    assert files[0] == files[1] and len(set(b"".join(files[0]))) > 60


@pytest.mark.parametrize(("tokens", "chunk"), [(28, 10), (14, 5), (13, 5), (12, 5), (6, 4), (4, 3), (3, 2), (2, 1)])
def test_a_micro_batch_leaves_a_rest_of_the_heads_chunks(tokens, chunk):
    assert chunk_of(tokens) == chunk and (tokens % chunk > 0) == (tokens > 2)


def test_a_rank_with_two_tokens_has_no_rest_and_says_so(tmp_path):
    few = proxy_of(tmp_path, recipe(run={**SMALL["run"], "micro_batch": 1}), context=16, shard=1, ranks=16)
    assert [sentence.partition(":")[0] for sentence in few.unproved] == ["the rest of the head's chunks"]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])
def test_a_small_model_is_one_of_its_family(family):
    """transformers builds the reference from its config.json."""
    sizes = dict(
        hidden_size=96, intermediate_size=128, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4
    )
    model = ModelConfig(family=family, pad_token_id=None, **sizes).architecture(500)
    small = shrink(model, cell_of(2, shard=2), [0, 5, 11], ParallelConfig())
    again = architecture_from_hf(to_hf(small))
    assert again == replace(small, intermediate_size=again.intermediate_size), "mixtral's is the experts'"
    assert again.hidden_size < 96 and (again.rotary_dim or 2) % 2 == 0
