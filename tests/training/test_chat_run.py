"""A pretraining run on conversations: only answers count, and the lint before step 0 has nothing to say."""

import json

from tests import tiny
from tests.data.tokenize.test_chat_template import PLAIN, chat_rows
from windlass.commands.evaluate import evaluate
from windlass.config import RunConfig
from windlass.data.packing import NOT_COUNTED
from windlass.data.prepare.manifest import load_prepared
from windlass.data.prepare.prepare import open_prepared, prepare
from windlass.data.shards.mds import Reader
from windlass.report.events import read_events
from windlass.training.loop import train


def chat_recipe(base) -> RunConfig:
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
    (base / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows()))
    data = {
        "sources": [{"path": str(base / "chat.jsonl"), "format": "chat", "too_long": "cut-prompt"}],
        "tokenizer": {"from": str(made.tokenizer_directory)},
        "directory": str(base / "chat-data"),
        "sequence_length": 64,
    }
    return tiny.recipe(base, "chat", run={"steps": 2}, optim={"warmup_steps": 0}, data=data)


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
