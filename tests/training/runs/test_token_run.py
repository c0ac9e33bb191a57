"""Runs on tokens that were made before: 20 steps from files of each kind, resumed among them."""

import pytest

from tests import tiny
from tests.data.tokens import writers
from tests.data.tokens.test_documents import ROW, write
from windlass.data.prepare.manifest import load_prepared
from windlass.data.prepare.prepare import prepare
from windlass.report.events import read_events
from windlass.training.loop import train

KINDS = ("nanoGPT", "llm.c", "Megatron", "LLM Foundry's bytes", "samples")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("base")
    prepare(tiny.recipe(base).data, {}, log=lambda line: None)
    return base


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_on_tokens(base, kind):
    made = load_prepared(base / "data")
    documents = writers.encoded(made.tokenizer_directory)
    name = kind.replace("'", "")
    source = write("LLM Foundry's bytes" if kind == "samples" else kind, base / name, documents, made.eos_id)
    data = {
        "sources": [{"format": "tokens", **source, **({"stored": "samples"} if kind == "samples" else {})}],
        "tokenizer": {"from": str(made.tokenizer_directory)},
        "directory": str(base / f"{name}-data"),
        "sequence_length": 32,
        "validation": 0.2 if kind in ("samples", "Megatron") else {"bytes": 2000},
    }
    changes = {"run": {"steps": 20}, "checkpoint": {"every_steps": 10}, "evaluate": {"every_steps": 10}, "data": data}
    config = tiny.recipe(base, f"run-{name}", **changes)
    train(config.with_steps(12))
    train(config)
    lines = read_events(config.run.directory / "events.jsonl")
    losses = {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}
    assert set(losses) == set(range(1, 21)) and losses[20] < losses[1]
    scored = [line for line in lines if line["kind"] == "validation" and line["step"] == 20]
    assert len(scored) == 1 and scored[0]["bits_per_byte"] > 0 and ROW == 33
