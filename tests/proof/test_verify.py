"""`windlass verify`: proofs of layouts, what it says of what it does not prove, and mistakes of the user."""

import json
import signal
import sys
from dataclasses import replace

import pytest
import yaml

from tests import tiny
from tests.proof.test_pool import crash
from windlass.cli import main as cli
from windlass.errors import EXIT_NOT_EQUAL, UserError
from windlass.model.lora.adapter import adapter_of, trained_shapes
from windlass.model.open_config import architecture_of
from windlass.proof import fold_layout, verify
from windlass.proof.compare import ProofRow
from windlass.proof.fold_layout import fold_onto_ranks
from windlass.proof.proxy import make_proxy
from windlass.proof.verdict import Verdict

DROPOUT = (
    "the decoder on one process, which is ours on both sides here: dropout, whose masks transformers cannot reproduce"
)
PACKING = "packing: both sides read the samples that one preparation of ours packed"
SPREAD = "the spread of drawn weights: both sides draw them by one rule of ours"
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES = {
    "qwen3 tied": {},
    "qwen3": {"tie_word_embeddings": False},
    "llama": {"family": "llama", "head_dim": None, "rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": False},
    "mistral": {"family": "mistral", "sliding_window": 8, "tie_word_embeddings": False},
    "qwen2": {
        "family": "qwen2",
        "head_dim": None,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "smollm3": {"family": "smollm3", "head_dim": None, "pad_token_id": 7},
    "qwen3_moe": {
        "family": "qwen3_moe",
        "intermediate_size": None,
        **dict(
            num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1, mlp_only_layers=[2]
        ),
        **dict(norm_topk_prob=True, output_router_logits=True, tie_word_embeddings=False),
    },
    "gpt2": {
        "family": "gpt2",
        **dict.fromkeys(tiny.QWEN3_KEYS),
        **dict(n_embd=24, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    },
    "gpt2 dropped": {
        "family": "gpt2",
        **dict.fromkeys(tiny.QWEN3_KEYS),
        **dict(n_embd=24, n_positions=64),
    },
}
LAYOUTS = {
    "ddp2": {"zero": 0, "replicate": 2},
    "zero1": {"zero": 1, "shard": 2},
    "zero2": {"zero": 2, "shard": 2},
    "zero3": {"shard": 3},
    "hsdp": {"shard": 2, "replicate": 2},
    "offload, units, prefetch": {"shard": 2, "offload": True, "prefetch": 1},
    "tp2": {"tp": 2, "shard": 1},
    "tp2 x shard2": {"tp": 2, "shard": 2},
    **{
        schedule: {"pp": 2, "shard": 1, "schedule": schedule}
        for schedule in ("gpipe", "1f1b", "interleaved-1f1b", "zbv")
    },
    "interleaved-zero-bubble x ddp2": {"pp": 2, "zero": 0, "replicate": 2, "schedule": "interleaved-zero-bubble"},
    "pp2 x shard2 x tp2": {"pp": 2, "shard": 2, "tp": 2},
    "zbv x shard2 x tp2": {"pp": 2, "shard": 2, "tp": 2, "schedule": "zbv"},
    "context2": {"context": 2, "shard": 1},
    "ulysses2 x tp2 x shard2": {"context": 2, "context_kind": "ulysses", "tp": 2, "shard": 2},
    "zbv x context2": {"pp": 2, "context": 2, "shard": 1, "schedule": "zbv"},
    "replicate2 x shard2 x tp2": {"replicate": 2, "shard": 2, "tp": 2, "recompute": "full"},
}
DEALT = {
    "expert2": {"expert": 2, "shard": 2},
    "expert2 x context2 x tp2": {"expert": 2, "shard": 1, "context": 2, "tp": 2},
}
QUICK = [("qwen3 tied", "tp2"), ("gpt2 dropped", "1f1b")]
CELLS = [
    pytest.param(family, layout, marks=() if (family, layout) in QUICK else pytest.mark.long)
    for family in FAMILIES
    for layout in LAYOUTS
]
CELLS += [pytest.param("qwen3_moe", layout, marks=pytest.mark.long) for layout in DEALT]


def recipe(tmp_path, model, parallel, **sections):
    blocks = {"n_layer": 4} if model.get("family") == "gpt2" else {"num_hidden_layers": 4}
    heads = {"n_head": 4} if model.get("family") == "gpt2" else {"num_attention_heads": 4, "num_key_value_heads": 2}
    return tiny.recipe(tmp_path, model={**blocks, **heads, **model}, parallel=parallel, **sections)


def prove(tmp_path, ranks, model, parallel, **sections):
    config = recipe(tmp_path, model, parallel, **sections)
    architecture = config.model.architecture(300)
    (cell,) = fold_onto_ranks(config.parallel, None, 8).cells
    proxy = make_proxy(config, architecture, cell, tmp_path / "proxy")
    return verify.prove(proxy, cell, ranks)


def assert_proved(verdict):
    assert not verdict.failed, verdict.failed
    assert verdict.agrees, [(row.what, row.where) for row in verdict.rows if not row.agrees]
    rows = [row.what for row in verdict.rows if row.what != "router figures"]
    assert len(rows) == 16 + 3 * (3 if verdict.cell.world > 1 else 1)
    is_ours = verdict.against.startswith("our own decoder")
    assert [one.startswith("the decoder on one process, which is ours") for one in verdict.unproved] == [True] * is_ours


@pytest.mark.parametrize(("family", "layout"), CELLS)
def test_layouts_are_proved(tmp_path, ranks, family, layout):
    data = {"isolate": layout.startswith("zero"), "packing": "best-fit" if "2" in layout else "concatenate"}
    verdict = prove(tmp_path, ranks, FAMILIES[family], (LAYOUTS | DEALT)[layout], data=data)
    assert_proved(verdict)
    assert (family == "qwen3_moe") == any(row.what == "router figures" for row in verdict.rows)
    assert verdict.against.startswith("our own decoder" if "dropped" in family else "torch and transformers")
    assert (DROPOUT in verdict.unproved) == ("dropped" in family)


@pytest.mark.parametrize(
    ("adapter", "layout"),
    [
        ({"rank": 4}, "tp2"),
        *(
            pytest.param(adapter, layout, marks=pytest.mark.long)
            for adapter in (
                {"base": "nf4"},
                {"targets": ["0.self_attn.q_proj", "down_proj"], "also_train": ["*norm*"], "rank_stabilized": True},
            )
            for layout in ("ddp2", "hsdp", "tp2 x shard2", "zbv x shard2 x tp2", "context2")
        ),
        pytest.param({"dropout": 0.3}, "tp2 x shard2", marks=pytest.mark.long),
    ],
)
def test_adapters_are_proved(tmp_path, ranks, adapter, layout):
    """Beside factors that begin away from zero, read from files; the base keeps its bits."""
    base = tiny.write_base(tmp_path / "base", num_hidden_layers=4)
    model = dict.fromkeys(tiny.MODEL) | {"from": str(base)}
    sections = {
        "adapter": {"kind": "lora", **adapter},
        "optim": {"groups": [{"names": ["*lora_B*"], "learning_rate_scale": 3.0}]},
    }
    config = tiny.recipe(tmp_path, model=model, parallel=LAYOUTS[layout], **sections)
    (cell,) = fold_onto_ranks(config.parallel, None, 8).cells
    proxy = make_proxy(config, architecture_of(config.model), cell, tmp_path / "proxy")
    verdict = verify.prove(proxy, cell, ranks)
    rows = {row.what: row for row in verdict.rows}
    assert verdict.agrees and not verdict.failed, [(row.what, row.where) for row in verdict.rows if not row.agrees]
    assert verdict.against.startswith("our own decoder" if "dropout" in adapter else "torch and transformers")
    assert rows["frozen base"].largest == 0
    also = sum(
        "norm" in name
        for name in trained_shapes(proxy.architecture, adapter_of(proxy.config.adapter, proxy.architecture))
    )
    assert bool(also) == ("also_train" in adapter)


PREFERRED = [
    pytest.param({"kind": "dpo", **loss}, adapter, layout, marks=pytest.mark.long)
    for loss, adapter, layout in (
        ({}, {}, "tp2"),
        ({}, {}, "ddp2"),
        ({"loss": "ipo"}, {}, "context2"),
        ({}, {"rank": 4}, "1f1b"),
        ({"loss": "robust", "label_smoothing": 0.1}, {"base": "nf4"}, "tp2 x shard2"),
        ({"loss": "simpo"}, {"rank": 4}, "hsdp"),
        ({"loss": "orpo", "beta": 0.2}, {}, "ddp2"),
    )
]


@pytest.mark.parametrize(("objective", "adapter", "layout"), PREFERRED)
def test_preferences_are_proved(tmp_path, ranks, objective, adapter, layout):
    """Beside the model that the proxy begins with, whose scores are kept over kills."""
    base = tiny.write_base(tmp_path / "base", num_hidden_layers=4)
    sections = {
        "model": dict.fromkeys(tiny.MODEL) | {"from": str(base)},
        "data": {"sources": [{"path": "pairs.jsonl", "format": "preference"}]},
        "objective": objective,
        "parallel": LAYOUTS[layout],
        **({"adapter": {"kind": "lora", **adapter}} if adapter else {}),
    }
    config = tiny.recipe(tmp_path, **sections)
    (cell,) = fold_onto_ranks(config.parallel, None, 8).cells
    proxy = make_proxy(config, architecture_of(config.model), cell, tmp_path / "proxy")
    verdict = verify.prove(proxy, cell, ranks)
    assert verdict.agrees and not verdict.failed, [(row.what, row.where) for row in verdict.rows if not row.agrees]
    assert verdict.against.startswith("torch and transformers")
    assert "reported pairs" in [row.what for row in verdict.rows]
    assert proxy.config.keeps_reference == (objective.get("loss") not in ("simpo", "orpo"))


@pytest.mark.long
@pytest.mark.parametrize("optim", [
    {"kind": "muon"}, {"groups": [{"names": ["*norm*"], "weight_decay": 0.3}]},
    {"schedule": "wsd", "beta1": 0.8, "weight_decay": 0.0},
    {"groups": [{"names": ["*.0.*"], "frozen": True}, {"names": ["model.layers.3.*"], "learning_rate_scale": 2.0}]},
], ids=str)  # fmt: skip
def test_the_optimizers_settings_are_in_the_proof(tmp_path, ranks, optim):
    assert_proved(prove(tmp_path, ranks, {}, LAYOUTS["hsdp"], optim={"warmup_steps": 0, **optim}))


@pytest.mark.long
@pytest.mark.parametrize("group", [
    {"names": ["*.experts.*up_proj.weight"], "frozen": True}, {"names": ["*.experts.*"], "learning_rate_scale": 0.5}
], ids=str)  # fmt: skip
def test_groups_of_experts_are_proved_against_our_own_decoder(tmp_path, ranks, group):
    verdict = prove(tmp_path, ranks, FAMILIES["qwen3_moe"], DEALT["expert2"], optim={"groups": [group]})
    assert_proved(verdict)
    assert verdict.against.startswith("our own decoder") and "gate and up are one parameter" in verdict.against


def test_the_clip_is_between_the_steps_norms(tmp_path):
    config = recipe(tmp_path, {}, {"shard": 2})
    (cell,) = fold_onto_ranks(config.parallel, None, 8).cells
    proxy = verify.clipping_some(
        make_proxy(config, config.model.architecture(300), cell, tmp_path / "proxy"), [4.0, 1.0, 1.5]
    )
    assert proxy.config.optim.max_norm == 2.75


def run_command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["windlass", "verify", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A recipe in a file, in an empty directory."""
    tree = tiny.recipe(tmp_path / "elsewhere").model_dump(mode="json", by_alias=True, exclude_none=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    return "mine.yaml"


AGREES = ProofRow("loss", "3 steps", 0.0, 1e-10)
DIFFERS = ProofRow("gradients", "9 tensors", 0.5, 1e-10, "lm_head.weight[0, 1] on rank 1: 2.0, one process has 1.0")


@pytest.mark.parametrize(
    ("rows", "failed", "code"),
    [
        ([AGREES], "", 0),
        ([AGREES, DIFFERS, replace(DIFFERS, what="weights")], "", EXIT_NOT_EQUAL),
        ([], "rank 1 of 2 failed", EXIT_NOT_EQUAL),
    ],
)
def test_exit_code_table_and_json_report_the_verdict(written, monkeypatch, capsys, tmp_path, rows, failed, code):
    monkeypatch.setattr(verify, "prove", lambda proxy, cell, pool: Verdict(cell, rows, failed))
    assert run_command(monkeypatch, written, "--nproc", "2", "--json", "out.json") == code
    printed, content = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert "shard 2, zero 3: 2 ranks" in printed and "bf16, fp16 and fp8" in printed
    (cell,) = content["cells"]
    assert content["agrees"] == cell["agrees"] == (code == 0)
    assert [row["what"] for row in cell["rows"]] == [row.what for row in rows]
    if DIFFERS in rows:
        assert f"first difference: gradients: {DIFFERS.where}" in printed and cell["first"]["what"] == "gradients"
    assert (f"and then: weights: {DIFFERS.where}" in printed) == (DIFFERS in rows), (
        "a parameter, where a number was first"
    )
    if failed:
        assert failed in printed and cell["failed"] == failed
    verdict = "proved" if code == 0 else "not proved" if failed else "not equal"
    assert f"\n{verdict}: 1 of 1 layout" in printed
    assert content["not_proved"][-len(verify.NEVER_PROVED) :] == list(verify.NEVER_PROVED)


def test_what_both_sides_share_is_listed_as_not_proved(written, monkeypatch, capsys, tmp_path):
    """Packing, the rule that weights are drawn by and, with dropout, the decoder: a mistake of ours in them cancels."""
    monkeypatch.setattr(verify, "prove", lambda proxy, cell, pool: Verdict(cell, [AGREES], unproved=[DROPOUT]))
    run_command(monkeypatch, written, "--nproc", "2", "--json", "out.json")
    listed = capsys.readouterr().out.partition("\nnot proved:\n")[2].splitlines()
    content = json.loads((tmp_path / "out.json").read_text())
    for sentence in (PACKING, SPREAD, DROPOUT):
        assert f"  - {sentence}" in listed and sentence in content["not_proved"]


def test_a_crash_in_a_library_is_a_line_and_its_case_runs_once_more(written, monkeypatch, capsys, tmp_path):
    def prove(proxy, cell, pool):
        pool.run(2, crash, signal.SIGSEGV, 1, str(tmp_path))
        return Verdict(cell, [AGREES])

    monkeypatch.setattr(verify, "prove", prove)
    assert run_command(monkeypatch, written, "--nproc", "2") == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith(
        "warning: the case runs once more, on new ranks: rank 1 of 2 failed first: died with exit code -11"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.yaml"], "no recipe at nothing.yaml"),
        (["mine.yaml", "--nproc", "17"], "--nproc 17"),
        (["mine.yaml", "--json", "nowhere/out.json"], "--json nowhere/out.json"),
        (["mine.yaml", "parallel.tp=2"], "for a model of 3 query heads"),
        (["mine.yaml", "parallel.shard=3", "parallel.zero=0"], "parallel.zero=0 with parallel.shard=3"),
        (["mine.yaml", "optim.groups=[{names: [nothing], frozen: true}]"], "optim.groups[0].names has 'nothing'"),
        (["mine.yaml", "model={from: org/never-fetched}"], "org/never-fetched"),
        (["mine.yaml", "--nproc", "3", "parallel.shard=-1", "parallel.replicate=2"], "on 3 ranks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_three_lines_and_start_nothing(written, monkeypatch, capsys, tmp_path, arguments, said):
    before = sorted(tmp_path.rglob("*"))
    assert run_command(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert said in error and [line.split(":")[0].strip() for line in error.splitlines()] == [
        "windlass",
        "rule",
        "change",
    ]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_layout_that_cannot_be_taken_apart_says_so():
    with pytest.raises(UserError, match=r"the part pp of this layout: parallel\.bucket_mib=3"):
        fold_layout._folded(tiny_parallel(), ("pp",))


def tiny_parallel():
    from windlass.parallel.config import ParallelConfig

    return ParallelConfig(pp=2, replicate=2, zero=0, tp=1, schedule="gpipe", bucket_mib=3).model_copy(
        update={"zero": 3}
    )
