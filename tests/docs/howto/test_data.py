"""Every recipe of the pages on data is prepared, on small files of the names that the pages use."""

import contextlib
import gzip
import json
import re
from pathlib import Path

import pytest
import yaml
from tokenizers import AddedToken

from tests import tiny
from tests.data.conftest import make_text
from tests.data.conftest import small as small  # a fixture
from tests.data.planted import TURN, Planted
from tests.data.tokenize.test_chat_template import PLAIN, chat_rows
from tests.data.tokenize.test_preferences import pair_rows
from tests.data.tokens import writers
from tests.loopback import hub as hub  # a fixture
from tests.training.runs.test_skips import spoil
from windlass.commands.data_consumed import consumed
from windlass.config import check_recipe
from windlass.data.lint.lint import lint
from windlass.data.lint.statistics import read_sample
from windlass.data.tokenize.fill_in_middle import MARKS
from windlass.data.tokenize.tokenizer import open_tokenizer
from windlass.training.preflight import prepare_only

HOWTO = Path(__file__).parents[3] / "docs" / "howto"
DATASET = "---\nconfigs:\n- config_name: sample-10BT\n  data_files: sample/*.jsonl\n---\n"


def blocks(page):
    """(heading, recipe) of every block of YAML."""
    found = re.findall(r"^#+ ([^\n]*)\n|^```yaml\n(.*?)^```", (HOWTO / page).read_text(), re.M | re.S)
    heading = ""
    for title, block in found:
        heading = title or heading
        if block:
            yield pytest.param(block, id=f"{page}: {heading}")


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def place(tmp_path, monkeypatch, small, hub):
    """A working directory with the files that the pages name, and a hub with the names that they use."""
    import pyarrow
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    texts = [make_text(60, number) for number in range(200)]
    for number, text in enumerate(texts[:40]):
        path = tmp_path / "corpus" / str(number % 2) / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "incoming").mkdir()
    for number, text in enumerate(texts[:100]):
        (tmp_path / "incoming" / f"{number:03}.txt").write_text(text)
    (tmp_path / "incoming" / "_SUCCESS").touch()
    (tmp_path / "code").mkdir()
    for number, text in enumerate(texts[:40]):
        (tmp_path / "code" / f"{number}.py").write_text(text)
    (tmp_path / "rows").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"body": texts[20:80]}), tmp_path / "rows" / "a.parquet")
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(lines({"body": t} for t in texts[80:140]).encode()))
    (tmp_path / "bucket" / "lines").mkdir(parents=True)
    (tmp_path / "bucket" / "lines" / "a.jsonl").write_text(lines({"text": text} for text in texts))
    (tmp_path / "chat.jsonl").write_text(lines(chat_rows()))
    (tmp_path / "pairs.jsonl").write_text(lines(pair_rows()))
    alpaca = [
        {"instruction": f"Name rope {n}.", "input": "", "output": f"It is rope {n}. " * (1 + n % 5)} for n in range(200)
    ]
    (tmp_path / "alpaca.json").write_text(json.dumps(alpaca))

    monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.endpoint)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    hub.add(
        "datasets/HuggingFaceFW/fineweb-edu",
        {"README.md": DATASET, "sample/a.jsonl": lines({"text": text} for text in texts)},
    )
    planted = Planted(small, tmp_path / "planted")
    planted.tokenizer.add_special_tokens(["<|im_start|>"])
    planted.tokenizer.add_tokens([AddedToken(mark, special=False) for mark in MARKS[0]])
    planted.tokenizer.save(str(planted.directory / "tokenizer" / "tokenizer.json"))
    planted.set_config(chat_template=PLAIN, eos_token=TURN)
    hub.add_directory("Qwen/Qwen3-0.6B", planted.directory / "tokenizer")
    for folder in ("megatron", "nanogpt", "foundry"):
        (tmp_path / folder).mkdir()
    documents, eos = (
        writers.encoded(planted.directory / "tokenizer"),
        open_tokenizer(planted.directory / "tokenizer")[1],
    )
    writers.megatron(tmp_path / "megatron" / "corpus_text_document.bin", documents)
    writers.nanogpt(tmp_path / "nanogpt" / "train.bin", documents, eos)
    rows = writers.windows(documents, eos, 64)[:-1]
    writers.mds(tmp_path / "foundry" / "train", rows[:-20])
    writers.mds(tmp_path / "foundry" / "val", rows[-20:])
    yield tmp_path
    from huggingface_hub import HfFileSystem

    HfFileSystem.clear_instance_cache()


@pytest.mark.parametrize("block", [*blocks("prepare-data.md"), *blocks("offline-cluster.md")])
def test_a_recipe_of_the_page_is_prepared_and_has_nothing_to_find(block, place):
    tree = yaml.safe_load(block.replace("s3://", f"file://{place}/"))
    length = tree["data"]["sequence_length"]
    run = {"directory": "run", "steps": 2, "tokens_per_step": 4 * length}
    model = tree.get("model") or {"preset": "gpt2-124m"}
    prepared = prepare_only(check_recipe({**tree, "run": run, "model": model}), with_weights=False)
    assert prepared.sets["train"].samples > 4 and read_sample(prepared, "train", 0).rows
    errors = [finding for finding in lint(prepared).findings if finding.severity == "error"]
    assert errors == []


@pytest.mark.parametrize("page", ["prepare-data.md", "offline-cluster.md"])
def test_every_block_of_a_page_is_found(page):
    assert len(list(blocks(page))) == (HOWTO / page).read_text().count("\n```yaml\n") > 0


def train_in(directory, config):
    """On a rank, which may have begun in another test's directory."""
    with contextlib.chdir(directory):
        return tiny.train(config)


@pytest.mark.long
def test_a_run_of_the_page_leaves_a_bad_shard_out_and_reports_what_it_consumed(place, ranks):
    (block,) = [given.values[0] for given in blocks("prepare-data.md") if "max_bad_shards" in given.values[0]]
    data = {**dict.fromkeys(tiny.recipe(place).data.model_dump(exclude_unset=True)), **yaml.safe_load(block)["data"]}
    length = data["sequence_length"]
    config = tiny.recipe(place, data=data, run={"steps": 12, "tokens_per_step": 8 * length})
    prepared = prepare_only(config)
    spoil(prepared.directory, 0)
    ranks.run(1, train_in, place, config)
    logged = list(consumed(config.run.directory, place / "list"))
    listed = (place / "list").read_text().splitlines()
    assert any(line.startswith(f"consumed: {len(listed)} samples") for line in logged) and len(listed) > 40
    assert any(line.startswith("lost: ") for line in logged)


def message(name, parent, role, rank, text):
    return {"message_id": name, "parent_id": parent, "role": role, "rank": rank, "text": text}


def test_the_script_for_trees_takes_the_replies_that_were_ranked_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        message("a", None, "prompter", None, "how deep?"),
        message("a0", "a", "assistant", 1, "wrong"),
        message("a1", "a", "assistant", 0, "ten fathoms"),
        message("a10", "a1", "prompter", None, "and there?"),
        message("a11", "a1", "prompter", 0, "sure?"),
        message("a110", "a11", "assistant", 0, "yes"),
        message("b", None, "prompter", None, "nobody answers"),
        message("c", None, "prompter", None, "rope?"),
        message("c0", "c", "assistant", None, "hemp"),
        message("c00", "c0", "prompter", 0, "thanks"),
    ]
    (tmp_path / "messages.jsonl").write_text(lines(rows))
    (script,) = re.findall(r"^```python\n(import json\n.*?)^```", (HOWTO / "prepare-data.md").read_text(), re.M | re.S)
    exec(script, {})
    found = [json.loads(line)["messages"] for line in (tmp_path / "threads.jsonl").read_text().splitlines()]
    assert [[row["content"] for row in one] for one in found] == [
        ["how deep?", "ten fathoms", "sure?", "yes"],
        ["rope?", "hemp", "thanks"],
    ]
    assert {row["role"] for one in found for row in one} == {"user", "assistant"}
