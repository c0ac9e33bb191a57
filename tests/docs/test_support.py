"""docs/support.md is what the config refuses today, and what the tests train."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def support():
    spec = importlib.util.spec_from_file_location("windlass_support", ROOT / "docs" / "generate" / "support.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(support):
    assert (ROOT / "docs" / "support.md").read_text() == support.support_page(support.kept()), "run `make docs`"


def test_the_cells_are_those_that_the_tests_train(support):
    assert support.collect() == support.kept(), "run `python docs/generate/support.py`"


def test_a_pair_is_proved_refused_or_open(support):
    cell = {"parallel.zero": 3, "parallel.shard": 4, "parallel.tp": 2, "precision.policy": "fp64", "data.isolate": True,
            "optim.kind": "adamw", "frozen": False, "dropout": False}  # fmt: skip
    assert [name for name in support.FEATURES if support.has(cell, name)] == ["zero 3", "shard", "tp", "isolate"]
    assert support.has({**cell, "parallel.recompute": "selective", "parallel.activation_gib": 0.2}, "activation_gib")
    assert support.has({**cell, "frozen": True, "optim.kind": "muon"}, "frozen")
    assert support.refusal("zero 2", "zero 3") == "" and support.refusal("shard", "tp") is None
    assert "parameters gathered through the step" in support.refusal("zero 3", "pp 1f1b")
    assert support.refusal("pp 1f1b", "pp zbv") == "" and "DDP" in support.refusal("zero 0 (DDP)", "offload")


def test_a_pair_that_verify_cannot_prove_is_unproved(support, tmp_path):
    page = support.support_page(support.kept())
    heads = [one.strip() for one in next(line for line in page.splitlines() if line.startswith("| |")).split("|")]
    rows = {cells[1].strip(): cells for line in page.splitlines() if len(cells := line.split("|")) == len(heads)}
    words = {(one, two): rows[one][heads.index(two)].strip() for one in support.FEATURES for two in support.FEATURES}
    for (one, two), word in words.items():
        left_out = {one, two} & {"bf16", "fp16", "bf16-pure", "fp8", "compile", "activation_gib"}
        assert word != ("open" if left_out else "unproved"), (one, two)
    assert list(words.values()).count("unproved") > 20 and list(words.values()).count("open") > 20
    assert words["bf16", "dropout"] == "unproved" and words["muon", "dropout"] == "open"


def test_small_tables_of_questions_come_before_that_of_all_pairs(support):
    page = (ROOT / "docs" / "support.md").read_text()
    questions = re.findall(r"^## (.+)$", page.partition("\n## All pairs\n")[0], re.M)
    assert questions == list(support.QUESTIONS) and set(support.LAYOUTS) < set(support.FEATURES)
    rows = re.findall(r"^\| ([\w ()-]+) \|" + r" ([*\w]*) \|" * len(support.LAYOUTS) + "$", page, re.M)
    found = {name: words for name, *words in rows if name != "setting"}
    assert set(found) == {one for settings in support.QUESTIONS.values() for one in settings}
    assert found["pp 1f1b"][support.LAYOUTS.index("zero 3")] == "refused" and found["lora"][0] == "yes"


def test_cells_are_reported_by_layout(support):
    cell = {"parallel.zero": 1, "parallel.pp": 2, "parallel.schedule": "zbv", "parallel.tp": 2, "precision.policy": "fp64",
            "data.isolate": True, "optim.kind": "adamw", "frozen": False, "dropout": True, "family": "gpt2", "tied": True,
            "test": "test_x.py::test_y"}  # fmt: skip
    assert support.layout_of(cell) == "pp 2 x tp 2, zero 1, schedule zbv, isolate, fp64"
    page = support.support_page([cell])
    assert "| `test_x.py::test_y` | pp 2 x tp 2, zero 1, schedule zbv, isolate, fp64 | gpt2 tied, dropout |" in page
    row = next(line for line in page.splitlines() if line.startswith("| pp zbv |")).split("|")
    heads = next(line for line in page.splitlines() if line.startswith("| |")).split("|")
    assert row[[one.strip() for one in heads].index("tp")].strip() == "yes"


def test_an_adapters_cell_proves_nothing_of_full_training(support):
    cell = {"parallel.zero": 3, "parallel.shard": 2, "parallel.tp": 2, "precision.policy": "fp64", "data.isolate": False,
            "optim.kind": "adamw", "frozen": False, "dropout": False, "family": "llama", "tied": True, "adapter.kind": "lora",
            "adapter.base": "nf4", "test": "test_x.py::test_y"}  # fmt: skip
    page = support.support_page([cell])
    heads = [one.strip() for one in next(line for line in page.splitlines() if line.startswith("| |")).split("|")]
    rows = {cells[1].strip(): cells for line in page.splitlines() if len(cells := line.split("|")) == len(heads)}
    assert rows["tp"][heads.index("shard")].strip() == "open"
    assert rows["lora on nf4"][heads.index("tp")].strip() == "yes" and rows["lora"][heads.index("tp")].strip() == "open"
    assert rows["lora on nf4"][heads.index("expert")].strip() == "refused"
    assert "shard 2 x tp 2, zero 3, lora on nf4, fp64" in page


def test_cells_of_preferences_are_in_their_own_table(support):
    cell = {"parallel.zero": 3, "parallel.shard": 2, "parallel.tp": 2, "precision.policy": "fp64", "data.isolate": False,
            "optim.kind": "adamw", "frozen": False, "dropout": False, "family": "llama", "tied": True, "adapter.kind": "lora",
            "adapter.base": "plain", "objective.kind": "dpo", "test": "test_x.py::test_y"}  # fmt: skip
    page = support.support_page([cell])
    assert "shard 2 x tp 2, zero 3, lora, dpo, fp64" in page and "| shard |  | **yes**" not in page
    table = page.partition("## Preferences")[2].partition("## Cells")[0]
    rows = {cells[1].strip(): [one.strip() for one in cells[2:5]] for line in table.splitlines()
            if len(cells := line.split("|")) == 6}  # fmt: skip
    assert rows[""] == ["all of the model", "lora", "lora on nf4"]
    assert rows["tp"] == rows["zero 3"] == ["open", "yes", "open"] and rows["pp zbv"] == ["open"] * 3
    assert rows["compile"] == ["unproved"] * 3 and rows["expert"] == ["open", "open", "refused"]
    assert "- expert with lora on nf4: most of its weights are in the experts" in table
    whole = {key: value for key, value in cell.items() if not key.startswith("adapter.")}
    assert "| tp | yes | open | open |" in support.support_page([whole])
    assert set(rows) - {"", "---"} == set(support.FEATURES) - set(support.ALONE)


def test_the_rest_of_a_recipe_of_preferences_is_taken(support):
    """Else a table of refusals would be of the recipe, and not of its layouts."""
    assert support.refusal("tp", "tp", is_pairs=True) is None
