"""recipes/finetune: each fits Qwen3-4B, its tiny proxy model trains and counts as the page says, its script makes chats."""

import json
import math
import subprocess
import sys

import pytest

from tests.docs.test_techniques import ROOT, beside, fill, measure
from windlass.config import load_recipe
from windlass.model.config import ModelConfig
from windlass.parallel.rules.check_layout import check_layout

RECIPES = sorted((ROOT / "recipes" / "finetune").glob("*.yaml"))
finetune = beside(ROOT / "benchmarks", "finetune")
COUNTED = json.loads(finetune.RESULTS.read_text())["recipes"]
PAGE = ROOT / "docs" / "howto" / "finetune.md"


def test_every_recipe_is_counted_and_the_page_shows_the_counts():
    assert [path.stem for path in RECIPES] == list(COUNTED)
    assert PAGE.read_text("utf-8") == fill.filled(PAGE), "run `make docs`"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_its_model_on_its_ranks(path):
    config, architecture = load_recipe(str(path)), ModelConfig(preset="qwen3-4b").architecture()
    worlds = [1] if path.stem == "nf4-one-process" else [2, 4, 8]
    for world in worlds:
        check_layout(config.parallel, architecture, world)
        layout = config.parallel.layout(world)
        assert layout.world == world and config.accumulation(layout.batch_ranks) >= layout.pp
    assert (config.adapter.base == "nf4") == path.stem.startswith("nf4")
    assert (config.adapter.kind == "none") == path.stem.startswith("full")


def test_recipes_differ_in_adapter_layout_and_rate_alone():
    def rest(path):
        config = load_recipe(str(path)).model_dump()
        return {name: held for name, held in config.items() if name not in ("run", "adapter", "parallel", "optim")}

    chats = [path for path in RECIPES if not path.stem.startswith("dpo")]
    assert len({json.dumps(rest(path), default=str) for path in chats}) == 1


def test_meetings_become_conversations():
    ami = beside(ROOT / "recipes" / "finetune", "ami")
    for key in ("transcript", "dialogue"):
        asked, answer = ami.conversation({key: " Yeah. Okay. ", "summary": "They agree. "})["messages"]
        assert asked == {"role": "user", "content": "Summarise this meeting.\n\nYeah. Okay."}
        assert answer == {"role": "assistant", "content": "They agree."}


def test_meetings_become_pairs_of_their_own_and_the_next_summary(tmp_path):
    rows = [{"transcript": f"Talk {number}.", "summary": f"Summary {number}. "} for number in range(3)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    script = ROOT / "recipes" / "finetune" / "ami.py"
    subprocess.run([sys.executable, script, "--pairs", tmp_path / "in.jsonl", tmp_path / "out.jsonl"], check=True)
    made = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    found = [
        (pair["prompt"][0]["content"][-7:], *(pair[key][0]["content"] for key in ("chosen", "rejected")))
        for pair in made
    ]
    assert found == [
        ("Talk 0.", "Summary 0.", "Summary 1."), ("Talk 1.", "Summary 1.", "Summary 2."), ("Talk 2.", "Summary 2.", "Summary 0."),
    ]  # fmt: skip


def test_the_layouts_of_an_adapter_train_the_same():
    """In the committed counts: bf16, whose sums tensor parallelism takes in another order."""
    for adapter, tolerance in (("nf4", 1e-6), ("lora", 1e-4)):
        losses = [row["losses"] for name, row in COUNTED.items() if name.startswith(adapter)]
        assert len(losses) == 3 and all(one == pytest.approx(losses[0], rel=tolerance) for one in losses)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("finetune")
    finetune.write_twin(made)
    return made


@pytest.mark.long
@pytest.mark.parametrize("name", list(COUNTED))
def test_a_proxy_trains_and_keeps_and_sends_what_the_page_says(ranks, folder, monkeypatch, name):
    monkeypatch.setattr(finetune, "measure", measure)
    found = finetune.count(ranks, name, folder)
    assert found["per_rank"] == COUNTED[name]["per_rank"]
    assert found["losses"] == pytest.approx(COUNTED[name]["losses"], rel=1e-2) and len(found["losses"]) == 3
    assert not any(math.isnan(loss) for loss in found["losses"])
