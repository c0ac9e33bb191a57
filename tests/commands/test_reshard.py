"""Checkpoints around a ring of layouts and back: every bit of weights and optimizer states, by loading and saving on ranks, and
by one process offline, which puts each rank's bytes into its own file."""

import functools
import shutil

import pytest

from tests import tiny
from tests.training.runs.resuming import carry
from windlass.checkpoint.index import read_tensor_index
from windlass.checkpoint.keep import Difference, diff
from windlass.checkpoint.verify import Checkpoint, verify_checkpoint
from windlass.commands.models.export import export
from windlass.commands.reshard import move
from windlass.errors import UserError
from windlass.training.run_directory import hold

RING = {
    "zero3 x4": (4, {"shard": 4}),
    "tp2 x shard2": (4, {"tp": 2, "shard": 2}),
    "pp2 x shard2": (4, {"pp": 2, "shard": 2}),
    "pp2 interleaved x tp2": (4, {"pp": 2, "tp": 2, "shard": 1, "schedule": "interleaved-1f1b"}),
    "one": (1, {"shard": 1}),
    "ddp2": (2, {"zero": 0, "replicate": 2}),
}
MORE = {
    "hsdp2x2": (4, {"replicate": 2, "shard": 2}),
    "pp2 x replicate2 x tp2": (8, {"pp": 2, "replicate": 2, "shard": 1, "tp": 2}),
    "zbv x shard2": (4, {"pp": 2, "shard": 2, "schedule": "zbv"}),
}
EXPERTS = {
    "shard4 x expert2": (4, {"shard": 4, "expert": 2}),
    "shard2 x expert2 x tp2": (4, {"shard": 2, "expert": 2, "tp": 2}),
    "pp2 x shard2 x expert2": (4, {"pp": 2, "shard": 2, "expert": 2}),
}
CONTEXT = {
    "context2 x shard2": (4, {"context": 2, "shard": 2}),
    "pp2 x context2": (4, {"pp": 2, "context": 2, "shard": 1}),
}
QWEN3 = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 36,
}  # 9 of 36 over 4
GPT2 = {**dict.fromkeys(tiny.QWEN3_KEYS), "family": "gpt2", "n_embd": 24, "n_layer": 4, "n_head": 4, "n_positions": 48}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
MOE = {**QWEN3, "family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
ADAPTERS = {  # factors of an adapter, and with them norms; trained on two tensor ranks
    "lora": {"kind": "lora", "rank": 3, "also_train": ["*norm*"]},
    "nf4": {"kind": "lora", "rank": 3, "base": "nf4"},
}
MODELS = {"tied": QWEN3, "untied": {**QWEN3, "tie_word_embeddings": False}, "gpt2": GPT2, "experts": MOE}


def newest(run):
    return max((run / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def trained(tmp_path_factory, ranks):
    """A run of two steps on two DDP replicas, or tensor ranks: its newest checkpoint, and its recipe."""

    @functools.cache
    def make(model, kind="adamw"):
        base = tmp_path_factory.mktemp(f"ring-{model}-{kind}")
        given = {"model": MODELS.get(model), "parallel": RING["ddp2"][1]}
        if model in ADAPTERS:
            directory = tiny.write_base(base / "base", num_hidden_layers=4)
            given = {"model": dict.fromkeys(tiny.MODEL) | {"from": str(directory)}, "parallel": {"tp": 2}}
            given["adapter"] = ADAPTERS[model]
        config = tiny.recipe(base, run={"steps": 2}, optim={"kind": kind}, **given)
        ranks.run(2, tiny.train, config)
        return newest(config.run.directory), config

    return make


def boxes(checkpoint):
    """name -> its boxes, in whoever's files."""
    index = read_tensor_index(Checkpoint.open(checkpoint))
    return {name: sorted(part.box for part in tensor.parts()) for name, tensor in index.items()}


def offline(source, target, layout):
    world, parallel = (RING | MORE | CONTEXT | EXPERTS)[layout]
    logged = list(move(source, target, {"parallel": parallel}))
    assert f"for {world} ranks" in logged[0] and "every byte verified" in logged[1]
    return newest(target)


def on_ranks(ranks, config, source, target, layout):
    world, parallel = (RING | MORE | CONTEXT | EXPERTS)[layout]
    tree = config.model_dump(mode="json", by_alias=True)
    ranks.run(world, carry, source, target / "checkpoints", tree, world, parallel)
    return newest(target)


@pytest.mark.parametrize("model", ["tied", *(pytest.param(one, marks=pytest.mark.long) for one in ("untied", "gpt2"))])
def test_around_the_ring_offline_every_bit_stays(trained, tmp_path, model):
    first, _ = trained(model)
    source = first
    for number, layout in enumerate(RING):
        source = offline(source, tmp_path / str(number), layout)
        difference = diff(first, source)
        assert difference == Difference(same=difference.same) and difference.same > 3 * 4 * 8, layout
        assert verify_checkpoint(source) == []
    assert boxes(source) == boxes(first), "and the last is cut as the first"


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("tied", ["tp2 x shard2", "pp2 interleaved x tp2", "ddp2"]),
        *(
            pytest.param(model, list(RING), marks=pytest.mark.long)
            for model in ("tied", "untied", "gpt2", "lora", "nf4")
        ),
    ],
)
def test_around_the_ring_by_loading_every_bit_stays(trained, ranks, tmp_path, model, layouts):
    first, config = trained(model)
    source = first
    for number, layout in enumerate(layouts):
        source = on_ranks(ranks, config, source, tmp_path / str(number), layout)
        difference = diff(first, source)
        assert difference == Difference(same=difference.same) and difference.same > 3 * 4 * 8, layout


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("tied", "tp2 x shard2"),
        *(pytest.param("tied", one, marks=pytest.mark.long) for one in RING | MORE | CONTEXT if one != "tp2 x shard2"),
        *(pytest.param("experts", one, marks=pytest.mark.long) for one in ("zero3 x4", "tp2 x shard2", *EXPERTS)),
        *(pytest.param("lora", one, marks=pytest.mark.long) for one in ("zero3 x4", "tp2 x shard2", "pp2 x shard2")),
        *(pytest.param("nf4", one, marks=pytest.mark.long) for one in ("zero3 x4", "tp2 x shard2")),
    ],
)
def test_parts_are_those_that_ranks_of_the_layout_save(trained, ranks, tmp_path, model, layout):
    first, config = trained(model)
    own = on_ranks(ranks, config, first, tmp_path / "ranks", layout)
    made = offline(first, tmp_path / "offline", layout)
    assert boxes(made) == boxes(own) and diff(first, made) == Difference(same=len(boxes(own)))


def files_read(source, tree, world, parallel):
    """On one rank: the files that restoring opens, and whether rows of them are skipped."""
    import pathlib
    import tempfile

    import torch.distributed as dist

    opened = []
    reader = Checkpoint.reader

    def spy(self, name):
        opened.append(name)
        return reader(self, name)

    Checkpoint.reader = spy
    try:
        with tempfile.TemporaryDirectory() as scratch:
            box = [scratch]
            dist.broadcast_object_list(box)
            carry(source, pathlib.Path(box[0]), tree, world, parallel)
    finally:
        Checkpoint.reader = reader
    return {name for name in opened if name.startswith("rank-")}


@pytest.mark.parametrize(
    ("layout", "shared"),
    [
        ("tp2 x shard2", [0, 0, 0, 2]),  # what tensor ranks hold whole (norms) is with the first of them
        pytest.param("pp2 x shard2", [0, 0, 2, 2], marks=pytest.mark.long),
        pytest.param("zero3 x4", [0, 0, 0, 0], marks=pytest.mark.long),
    ],
)
def test_each_rank_then_reads_its_own_file(trained, ranks, tmp_path, layout, shared):
    first, config = trained("tied")
    world, parallel = RING[layout]
    made = offline(first, tmp_path / "offline", layout)
    tree = config.model_dump(mode="json", by_alias=True)
    for rank, read in enumerate(ranks.run(world, files_read, made, tree, world, parallel)):
        assert read <= {
            f"rank-{one:05d}.bin" for one in (rank, shared[rank], 0)
        }  # 0-dim counters are with the first rank
        assert f"rank-{rank:05d}.bin" in read


def test_muons_momentum_is_as_its_matrix(trained, tmp_path):
    first, _ = trained("tied", "muon")
    made = offline(first, tmp_path / "offline", "zero3 x4")
    cut = boxes(made)
    name = "model.layers.0.mlp.up_proj.weight"
    assert cut[f"optimizer.{name}.momentum"] == cut[f"model.{name}"] and len(cut[f"model.{name}"]) == 4
    assert diff(first, made).same == len(cut)


def test_a_run_goes_on_in_the_target(trained, ranks, tmp_path):
    first, config = trained("untied")
    target = tmp_path / "moved"
    list(move(first, target, {"parallel": {"shard": 2}}))
    longer = config.model_copy(update={"run": config.run.model_copy(update={"directory": target, "steps": 4})})
    longer = longer.model_copy(update={"parallel": type(config.parallel)(shard=2)})
    ranks.run(2, tiny.train, longer)
    assert sorted(path.name for path in (target / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000003",
        "step-00000004",
    ]
    assert ("resume", 2) in tiny.kinds(target)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("tied", "tp2 x shard2"),
        *(
            pytest.param(model, layout, marks=pytest.mark.long)
            for model in ("tied", "untied", "gpt2")
            for layout in ("tp2 x shard2", "pp2 interleaved x tp2", "zbv x shard2", "hsdp2x2")
            if (model, layout) != ("tied", "tp2 x shard2")
        ),
    ],
)
def test_the_export_is_that_of_one_process_bit_for_bit(trained, ranks, tmp_path, model, layout):
    first, config = trained(model)
    alone = on_ranks(ranks, config, first, tmp_path / "alone", "one")
    laid_out = on_ranks(ranks, config, first, tmp_path / "laid-out", layout)
    written = [
        export(checkpoint, tmp_path / f"export-{number}").directory
        for number, checkpoint in enumerate((alone, laid_out))
    ]
    one, other = ((directory / "model.safetensors").read_bytes() for directory in written)
    assert one == other and len(one) > 50_000


@pytest.mark.parametrize(
    ("given", "num_ranks", "message"),
    [
        ({"optim": {"learning_rate": 1}}, None, "a reshard moves bytes between the files of ranks"),
        ({"parallel": {"tp": 8}}, None, "parallel.tp=8 for a model of 4 query heads"),
        (
            {"parallel": {"pp": 8, "shard": 1}},
            None,
            "parallel.pp=8 with parallel.schedule=1f1b for a model of 4 blocks",
        ),
        ({"parallel": {"shard": 3}}, 4, "parallel.shard=3 on 4 ranks"),
        ({"parallel": {"shards": 3}}, None, "shards"),
        (
            {"parallel": {"tp": 2, "shard": 2, "expert": 2}},
            None,
            "parallel.expert=2 for a model of family qwen3 without experts",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused_and_nothing_is_made(trained, tmp_path, given, num_ranks, message):
    first, _ = trained("tied")
    with pytest.raises(UserError) as caught:
        list(move(first, tmp_path / "new", given, num_ranks=num_ranks))
    assert message in str(caught.value) and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("given", "said", "change"),
    [
        ({"tp": 3}, "parallel.tp=3 for a model of 4 query heads and 2 key/value heads", "use parallel.tp=1 or 2 or 4"),
        (
            {"context": 3},
            "data.sequence_length=16 with parallel.context=3",
            "use parallel.context=1 or 2 or 4",
        ),
        (
            {"context": 3, "context_kind": "ulysses"},
            "parallel.context=3 with parallel.context_kind=ulysses for a model of 4 query heads",
            "use parallel.context=2 or 4, or parallel.context_kind=allgather, which asks nothing of heads",
        ),
        (
            {"shard": -1},
            "parallel.shard=-1 without --ranks",
            "add --ranks N, or give the size: parallel.shard=4",
        ),
        (
            {"replicate": -1, "shard": 2},
            "parallel.replicate=-1 without --ranks",
            "add --ranks N, or give the size: parallel.replicate=4",
        ),
    ],
)
def test_a_refusal_advises_settings_of_the_layout_only(trained, tmp_path, given, said, change):
    first, _ = trained("tied")
    with pytest.raises(UserError) as caught:
        list(move(first, tmp_path / "new", {"parallel": given}))
    assert said in caught.value.given and not (tmp_path / "new").exists()
    assert caught.value.change == change


def test_ranks_say_what_minus_one_is(trained, tmp_path):
    first, _ = trained("tied")
    logged = list(move(first, tmp_path / "new", {"parallel": {"shard": -1}}, num_ranks=2))
    assert "for 2 ranks: shard 2" in logged[0]


def test_a_step_that_is_there_and_a_run_that_trains_are_refused(trained, tmp_path):
    first, config = trained("tied")
    logged = move(config.run.directory, config.run.directory, {}, step=2)
    with pytest.raises(UserError, match="is committed already") as caught:
        next(logged)  # before the first sentence
    assert caught.value.change == "choose another TARGET, or another --step"
    busy = tmp_path / "busy"
    busy.mkdir()
    with hold(busy), pytest.raises(UserError, match="cannot be written to"):
        list(move(first, busy, {}))
    assert not (busy / "checkpoints").exists()
    shutil.rmtree(busy)
