"""A pretraining run on conversations: only answers count, and the lint before step 0 has nothing to say."""

import json
import re

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests import tiny
from tests.data.tokenize.test_chat_template import PLAIN, chat_rows
from windlass.commands.models.evaluate import evaluate
from windlass.commands.models.export import export
from windlass.commands.models.generate import generate
from windlass.config import RunConfig
from windlass.data.batch_fields import NOT_COUNTED
from windlass.data.prepare.manifest import load_prepared
from windlass.data.prepare.prepare import open_prepared, prepare
from windlass.data.shards.mds import Reader
from windlass.report.events import read_events
from windlass.training.loop import train
from windlass.training.start.open_saved import open_saved


def chat_recipe(base, rows=None, **sections) -> RunConfig:
    """The tiny recipe on conversations, with the tiny recipe's tokenizer and a template."""
    like = tiny.recipe(base)
    prepare(like.data, {}, log=lambda line: None)
    made = load_prepared(base / "data")
    assert made is not None
    path = made.tokenizer_directory / "tokenizer_config.json"
    path.write_text(
        json.dumps(
            {
                **json.loads(path.read_text()),
                "chat_template": PLAIN.replace("<|im_end|>", "<|endoftext|>").replace("<|im_start|>", ""),
            }
        )
    )
    (base / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or chat_rows()))
    data = {
        "sources": [{"path": str(base / "chat.jsonl"), "format": "chat", "too_long": "cut-prompt"}],
        "tokenizer": {"from": str(made.tokenizer_directory)},
        "directory": str(base / "chat-data"),
        "sequence_length": 64,
    }
    run = {"steps": 2, **sections.pop("run", {})}
    return tiny.recipe(
        base, "chat", run=run, optim={"warmup_steps": 0, **sections.pop("optim", {})}, data=data, **sections
    )


def test_a_run_learns_answers_alone(tmp_path, capfd):
    config = chat_recipe(tmp_path)
    train(config)
    prepared = open_prepared(config.data, {})
    counted = [(labels[1:] != NOT_COUNTED).mean() for _, labels in Reader(prepared.shards("train"))]
    assert 0.3 < sum(counted) / len(counted) < 0.7, "questions and marks of turns are about half"
    losses = [line["loss"] for line in read_events(config.run.directory / "events.jsonl") if line["kind"] == "step"]
    assert len(losses) == 2 and all(loss > 0 for loss in losses)
    line = evaluate(config.run.directory)[0].line
    assert " nats per answer token, perplexity" in line and line.endswith(" answer tokens")
    out = capfd.readouterr().out
    assert "of conversations only answers are learned" in out
    assert "warning" not in out


def test_a_model_that_has_learned_answers_is_asked_in_its_template_by_card_and_command(tmp_path, capsys):
    config = chat_recipe(tmp_path)
    train(config)
    exported = export(config.run.directory).directory
    (block,) = re.findall("```python\n(.*?)```", (exported / "README.md").read_text(), re.S)
    assert "apply_chat_template" in block
    capsys.readouterr()
    exec(block.replace("PATH OR NAME", str(exported)), {})
    assert capsys.readouterr().out.endswith("\n")
    generate(config.run.directory, ["rope"])
    assert capsys.readouterr().err.count("this model has learned answers: --chat asks it") == 1
    generate(config.run.directory, ["rope"], chat=True)
    assert capsys.readouterr().err == ""


def test_a_run_learns_answers_by_their_weights(tmp_path):
    """One step on all samples, at a rate that moves no weight: its loss is the mean of all targets' nats by weight, each by
    torch's cross-entropy."""
    rows = [
        {
            "messages": [
                {**message, "weight": [1, 0.5, 0.13][n % 3]} if message["role"] == "assistant" else message
                for message in talk
            ]
        }
        for n, talk in enumerate(row["messages"] for row in chat_rows() if "messages" in row)
    ]
    config = chat_recipe(tmp_path, rows, optim={"learning_rate": 1e-30}, evaluate={"every_steps": 1})
    prepared = prepare(config.data, {}, log=lambda line: None)
    reader, percents = Reader(prepared.shards("train")), []
    samples = [(number, row) for number, count in enumerate(reader.shard_samples) for row in range(count)]
    tree = {"steps": 1, "micro_batch": 1, "tokens_per_step": 64 * len(samples)}
    train(config.model_copy(update={"run": config.run.model_copy(update=tree)}))
    model, nats, count = open_saved(config.run.directory).model, 0.0, 0.0
    for place in samples:
        ids, labels = (torch.from_numpy(column.astype(np.int64)) for column in reader.read(*place))
        held = reader.percent(*place)
        percent = torch.full_like(ids, 100) if held is None else torch.from_numpy(held.astype(np.int64))
        percents += percent[1:][labels[1:] != NOT_COUNTED].tolist()
        with torch.no_grad():
            each = cross_entropy(model(ids[None, :-1])[0], labels[1:], reduction="none")
        nats, count = nats + (each * percent[1:]).sum().item() / 100, count + percents_of(percent, labels)
    assert set(percents) == {100, 50, 13}
    (step,) = (line for line in read_events(config.run.directory / "events.jsonl") if line["kind"] == "step")
    assert step["targets"] == pytest.approx(count, abs=0.005) and step["targets"] != round(step["targets"])
    assert step["loss"] == pytest.approx(nats / count, rel=1e-5)
    validation = [line for line in read_events(config.run.directory / "events.jsonl") if line["kind"] == "validation"]
    score = evaluate(config.run.directory)[0]
    assert validation[-1]["loss"] == pytest.approx(score.loss, rel=1e-6), "validation scores each target once"


def percents_of(percent, labels):
    return percent[1:][labels[1:] != NOT_COUNTED].sum().item() / 100
