"""Sets as people have them: each is prepared, looked at and trained for 20 steps, and what is learned of it is counted by
`tokenizers` alone."""

import json
import random
import re

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from tests import tiny
from tests.data.chat_templates import CASES
from tests.data.planted import WORDS
from windlass.commands.data_inspect import print_set
from windlass.config import to_yaml
from windlass.data.batch_fields import NOT_COUNTED
from windlass.data.packing import unpack_samples
from windlass.data.prepare.prepare import open_prepared, prepare
from windlass.data.shards.mds import Reader
from windlass.report.events import read_events
from windlass.training.loop import train

STEPS, LENGTH = 20, 1152
TOOL = {"name": "depth", "description": "Sounds.", "parameters": {"type": "object", "properties": {"at": {}}}}


def sentence(draw, most=12):
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, most))).capitalize() + "."


def wikitext(draw):
    """Lines with headings between equals signs, and blank ones."""
    return ["".join(f" = {draw.choice(WORDS)} = \n\n {sentence(draw, 60)} \n\n" for _ in range(300))]


def pages(draw):
    return [" ".join(sentence(draw) for _ in range(draw.randint(1, 30))) for _ in range(150)]


def guanaco(draw):
    """OpenAssistant's conversations as text."""
    return [f"### Human: {sentence(draw)}### Assistant: {sentence(draw)}" for _ in range(300)]


TEXTS = {  # name -> (texts, how a file holds them, more of the source)
    "wikitext": (wikitext, "txt", {}),
    "c4": (pages, "jsonl", {}),
    "guanaco": (guanaco, "jsonl", {}),
    "columns": (pages, "csv", {"text": "body"}),
}


def alpaca(draw, number):
    asked, more, answer = sentence(draw), sentence(draw) if number % 3 else "", sentence(draw)
    return {"instruction": asked, "input": more, "output": answer}, [answer]


def sharegpt(draw, number):
    turns = [(sentence(draw), sentence(draw)) for _ in range(1 + number % 4)]
    said = [{"from": who, "value": words} for turn in turns for who, words in zip(("human", "gpt"), turn)]
    return {"id": f"x_{number}", "conversations": said}, [answer for _, answer in turns]


def glaive(draw, number):
    """Calls, what they gave back, and declarations as JSON; every third row has none."""
    call, answer = {"name": "depth", "arguments": {"at": draw.choice(WORDS)}}, sentence(draw)
    said = [("human", sentence(draw)), ("function_call", json.dumps(call)), ("observation", '{"m": 4}')] * (number % 3)
    said = [*said, ("human", sentence(draw)), ("gpt", answer)] if number % 3 == 0 else [*said, ("gpt", answer)]
    row = {"conversations": [{"from": who, "value": words} for who, words in said]}
    row["tools"] = json.dumps([TOOL] if number % 3 else [])
    written = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return row, [*[written] * (number % 3), answer]


def openassistant(draw, number):
    """A thread of a tree, as `messages`, with keys that say nothing of what is learned."""
    turns = [(sentence(draw), sentence(draw)) for _ in range(1 + number % 3)]
    said = [
        {"role": who, "content": words}
        for turn in turns
        for who, words in zip(("user", "assistant"), turn, strict=True)
    ]
    return {"messages": said, "lang": "en", "tree_id": number}, [answer for _, answer in turns]


def meetings(draw, number):
    """As summaries of meetings are: long questions."""
    answer = sentence(draw, 40)
    return {"prompt": " ".join(sentence(draw) for _ in range(8)), "completion": answer, "id": number}, [answer]


CHATS = {
    "alpaca": (alpaca, "alpaca"),
    "sharegpt": (sharegpt, "sharegpt"),
    "glaive": (glaive, "sharegpt"),
    "openassistant": (openassistant, None),
    "meetings": (meetings, None),
}


def write(path, rows, key="text"):
    if path.suffix == ".txt":
        path.write_text("".join(rows))
    elif path.suffix == ".csv":
        path.write_text(f"{key}\n" + "".join(f'"{text}"\n' for text in rows))
    else:
        path.write_text("".join(json.dumps({key: row} if isinstance(row, str) else row) + "\n" for row in rows))


def recipe(base, source, tokenizer, **data):
    data = {"sources": [source], "tokenizer": tokenizer, "sequence_length": LENGTH, "validation": "none", **data}
    return tiny.recipe(
        base,
        run={"steps": STEPS, "tokens_per_step": 4 * LENGTH},
        model={"max_position_embeddings": LENGTH},
        data=data,
        optim={"learning_rate": 1e-2},
        checkpoint={"every_steps": STEPS},
        evaluate={"every_steps": STEPS},
    )


def trained(config, capfd):
    """Prepared, looked at, and trained -> what `data inspect` says."""
    prepare(config.data, {}, log=lambda line: None)
    path = config.run.directory.parent / "recipe.yaml"
    path.write_text(to_yaml(config))
    capfd.readouterr()
    print_set(str(path), [], "train", "0", True)
    said = capfd.readouterr().out
    train(config)
    steps = [line for line in read_events(config.run.directory / "events.jsonl") if line["kind"] == "step"]
    losses = [line["loss"] for line in steps]
    assert [line["step"] for line in steps] == [*range(1, STEPS + 1)] and np.isfinite(losses).all()
    assert np.mean(losses[-3:]) < 0.9 * losses[0]
    return said


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "wikitext" else pytest.mark.long) for name in TEXTS]
)
def test_texts(tmp_path, capfd, name):
    make, end, more = TEXTS[name]
    texts = make(random.Random(name))
    write(tmp_path / f"a.{end}", texts, more.get("text", "text"))
    config = recipe(tmp_path, {"path": str(tmp_path / f"a.{end}"), **more}, {"train": 300})
    said = trained(config, capfd)
    prepared = open_prepared(config.data, {})
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_directory / "tokenizer.json"))
    stream = [prepared.eos_id]
    for text in texts:
        stream += [*tokenizer.encode(text, add_special_tokens=False).ids, prepared.eos_id]
    assert unpack_samples(Reader(prepared.shards("train"))).tolist() == stream
    assert f"tokens      {len(stream) - 1:,}" in said and len(texts) == prepared.sets["train"].documents


@pytest.mark.parametrize(
    ("name", "packing"),
    [
        *(pytest.param(name, "concatenate", marks=() if name == "sharegpt" else pytest.mark.long) for name in CHATS),
        *(pytest.param(name, "best-fit", marks=() if name == "glaive" else pytest.mark.long) for name in CHATS),
    ],
)
def test_conversations(tmp_path, capfd, small, name, packing):
    make, shape = CHATS[name]
    draw = random.Random(name)
    made = [make(draw, number) for number in range(120)]
    write(tmp_path / "a.jsonl", [row for row, _ in made])
    directory, case = tmp_path / "tokenizer", CASES["qwen 2.5"]
    directory.mkdir()
    tokenizer = Tokenizer.from_file(str(small[1].tokenizer_directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in case.specials.split()])
    tokenizer.save(str(directory / "tokenizer.json"))
    given = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": case.text()}
    (directory / "tokenizer_config.json").write_text(json.dumps(given))
    source = {"path": str(tmp_path / "a.jsonl"), "format": "chat"}
    source |= {"rows": shape} if shape else {}
    config = recipe(tmp_path, source, {"from": str(directory)}, packing=packing)
    said = trained(config, capfd)
    prepared = open_prepared(config.data, {})
    answers = [f"{answer}<|im_end|>" for _, found in made for answer in found]
    wanted = [number for answer in answers for number in tokenizer.encode(answer, add_special_tokens=False).ids]
    learned = [ids[1:][labels[1:] != NOT_COUNTED] for ids, labels in Reader(prepared.shards("train"))]
    assert sorted(np.concatenate(learned).tolist()) == sorted(wanted)
    assert prepared.sets["train"].documents == len(made)
    shown = said[said.index("\nsample 0") :].split("\n", 3)[3]  # behind its title and the legend
    (first, *_) = re.findall(r"⟧([^⟦⟧]+)", shown)
    assert any(answer.startswith(first.strip()[:20]) for answer in answers), shown[:400]
