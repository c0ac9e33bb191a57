"""docs/techniques/ and docs/walkthrough.md show what source and counts say now, name tests that exist; their recipes train."""

import ast
import copy
import importlib
import random
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.proof.bugs import BUGS
from windlass.config import load_recipe

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted((DOCS / "techniques").glob("*.md"))
RECIPES = sorted((DOCS / "techniques").glob("*.yaml"))
SECTIONS = [
    "What fills memory",
    "The idea",
    "The maths",
    "Kept and moved",
    "What silently goes wrong",
    "The recipe",
    "Measured",
]


def beside(folder, name):
    """A script's module, whose neighbours are on the path as when it is run."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


fill, pictures = beside(DOCS / "generate", "fill"), beside(DOCS / "generate", "pictures")
techniques = beside(ROOT / "benchmarks", "techniques")
EVERY = [*PAGES, DOCS / "walkthrough.md"]


def measure(config):
    """On a rank, which knows the tests and not the folder of scripts."""
    return beside(ROOT / "benchmarks", "meters.technique_meter").measure(config)


def name_of(path):
    return path.name


@pytest.mark.parametrize("page", EVERY, ids=name_of)
def test_what_a_page_shows_is_what_the_source_says(page):
    assert page.read_text("utf-8") == fill.filled(page), "run `make docs`"


def test_a_docstring_is_not_cut_in_the_middle_of_an_entry():
    page = DOCS / "techniques" / "tensor.md"
    cut = 'src/windlass/parallel/tensor.py from "kept per rank" to "{}"'
    assert "are trained" in fill.docstring(cut.format("are trained"), page)
    with pytest.raises(ValueError, match='in the middle of an entry, before "and beside masters'):
        fill.docstring(cut.format("per micro-batch (with zero 0"), page)


def test_drawings_are_up_to_date():
    stale = [path.name for path, svg in pictures.pictures().items() if path.read_text("utf-8") != svg]
    assert not stale, "run `make docs`"
    assert {path.name for path in pictures.pictures()} == {path.name for path in (DOCS / "techniques").glob("*.svg")}


def test_words_stay_on_their_drawing():
    """A letter is 0.53 em wide at most, on the mean of a line: measured in Chromium with DejaVu Sans, a wide one."""
    for path, svg in pictures.pictures().items():
        tree = ElementTree.fromstring(svg)
        for text in tree.iter("{http://www.w3.org/2000/svg}text"):
            width = 0.53 * float(text.get("font-size")) * len(text.text or "")
            left = float(text.get("x")) - {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor")] * width
            assert left >= 4 and left + width <= float(tree.get("width")) - 4, (path.name, text.text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_its_sections_a_drawing_and_a_recipe(page):
    text = page.read_text("utf-8")
    assert re.findall(r"^## (.+)$", text, re.M) == SECTIONS
    assert "file: docs/techniques/" + page.with_suffix(".yaml").name in text
    assert f"]({page.with_suffix('.svg').name})" in text
    assert f"table: {page.stem}" in text or f"; {page.stem}" in text


@pytest.mark.parametrize("page", EVERY, ids=name_of)
def test_files_that_a_page_links_to_exist(page):
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8"))
    assert links and not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tests_and_planted_mistakes_that_a_page_names_exist(page):
    text = page.read_text("utf-8")
    for row in text.splitlines():
        file = None
        for path, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row):
            file = ROOT / path
            names = {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}
            assert not test or test in names, f"{path} has no {test}"
    planted = {
        name
        for part in re.findall(r"planted as (.+?)(?: \||; |$)", text, re.M)
        for name in re.findall(r"`([^`]+)`", part)
    }
    assert planted <= set(BUGS), planted - set(BUGS)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_of_a_page_are_recipes_that_pass(page):
    commands = re.findall(r"^    (.*windlass train .+)$", page.read_text("utf-8"), re.M)
    for command in commands:
        words = command.split("windlass train ")[1].split()
        changes = [word for word in words[1:] if "=" in word]
        world = int(words[words.index("--nproc") + 1]) if "--nproc" in words else 16
        config = load_recipe(words[0], *changes)
        layout = config.parallel.layout(world)
        assert layout.world == world
        assert config.accumulation(layout.batch_ranks) >= 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where runs and their common data are: words of random letters, so that a tokenizer of 512 entries is full."""
    base, draw = tmp_path_factory.mktemp("techniques"), random.Random(5)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choice(letters) for _ in range(draw.randint(2, 9))) for _ in range(400)]
    (base / "corpus").mkdir()
    for number in range(40):
        (base / "corpus" / f"{number}.txt").write_text(" ".join(draw.choice(words) for _ in range(600)))
    return base


def comparable(page, row):
    """What does not depend on where the router sent the rows: all of it, but with experts what a rank keeps of them, and how many
    came to it. Over all ranks as many rows come as go."""
    ranks = copy.deepcopy(row["per_rank"])
    rows = [rank["sent"].get("all-to-all") for rank in ranks]
    if page != "expert":
        return row["layout"], ranks
    for rank in ranks:
        rank["kept"] = rank["flops"] = None
        rank["sent"].pop("all-to-all", None)
    exchanged = [sum(one[name] for one in rows if one) for name in ("calls", "payload")]
    return row["layout"], ranks, exchanged


def keep_least(found, other):
    """On a busy machine a thread of gloo may hold a buffer for a while that it has sent. So a rank keeps the least of what was
    counted; all else is the same."""
    for rank, again in zip(found["per_rank"], other["per_rank"], strict=True):
        rank["kept"] = min(rank["kept"], again["kept"])
        assert {**rank, "kept": 0} == {**again, "kept": 0}


QUICK = ("memory: one process",)
ROWS = [
    pytest.param(page, row, id=f"{page}: {row}", marks=() if f"{page}: {row}" in QUICK else pytest.mark.long)
    for page, rows in techniques.ROWS.items()
    for row in rows
]


@pytest.mark.parametrize(("page", "row"), ROWS)
def test_a_recipe_trains_and_keeps_and_sends_what_its_page_says(ranks, folder, monkeypatch, page, row):
    """Through the job of `windlass train`; counts do not depend on the text."""
    monkeypatch.setattr(techniques, "measure", measure)
    text = (f"data.sources=[{{path: {folder / 'corpus'}}}]", "evaluate.sequences=4")
    text = text[page == "dpo" :]  # whose pairs are in a file of their own
    found, said = techniques.count(ranks, page, row, folder, text), fill.results()[page][row]
    for again in range(2):
        if comparable(page, found) == comparable(page, said):
            break
        (folder / f"again-{again}").mkdir(exist_ok=True)
        keep_least(found, techniques.count(ranks, page, row, folder / f"again-{again}", text))
    assert comparable(page, found) == comparable(page, said)
    assert len(found["losses"]) == 3 and found["losses"][2] < found["losses"][0]
    if "timeline" in said:
        assert fill.idle_share(found) == pytest.approx(fill.idle_share(said))


def test_every_recipe_is_counted_and_every_count_has_a_page():
    assert (
        {path.stem for path in RECIPES} == {path.stem for path in PAGES} == set(techniques.ROWS) == set(fill.results())
    )
    counted = fill.results()
    assert {page: list(rows) for page, rows in techniques.ROWS.items()} == {
        page: list(counted[page]) for page in counted
    }


ALONE = {"expert": ("expert", "one process, 8 experts"), "dpo": ("dpo", "LoRA, one process")}


def test_every_layout_of_fp32_trains_what_one_process_trains():
    """Within fp32's tolerance, in the committed counts."""
    for page, rows in fill.results().items():
        for row, found in rows.items():
            if "simpo" in row:
                continue  # another loss
            alone = ALONE.get(page, ("memory", "one process"))
            if page == "lora":
                alone = page, f"{row.partition(',')[0]}, one process"
            one = fill.results()[alone[0]][alone[1]]["losses"]
            is_fp32 = (page != "precision" and "bf16" not in row) or row == "fp32"
            tolerance = 1e-5 if is_fp32 else 3e-3
            assert found["losses"] == pytest.approx(one, rel=tolerance), (page, row)


def test_counts_are_the_formulas_of_the_pages():
    """P parameters, ranks N = 4: DDP, ZeRO and HSDP to the byte (parallel/ddp.py, parallel/fsdp.py)."""
    found = {
        name: row["per_rank"][0] for page in ("memory", "ddp", "fsdp") for name, row in fill.results()[page].items()
    }
    whole = found["one process"]["parameters"]
    assert found["DDP"]["sent"]["all-reduce"]["payload"] == whole + 12
    for name, reductions, gathers in (("ZeRO-1", 1, 1), ("ZeRO-2", 2, 1)):
        assert found[name]["parameters"] == found[name]["gradients"] == found[name]["states"] // 2 == whole // 4
        assert found[name]["sent"]["reduce-scatter"]["ring"] == reductions * whole * 3 // 4
        assert found[name]["sent"]["all-gather"]["ring"] == gathers * whole * 3 // 4
    assert found["ZeRO-3"]["sent"]["all-gather"]["calls"] == 2 * (2 * 9 - 1)
    assert found["ZeRO-3, units of 2 blocks"]["sent"]["all-gather"]["calls"] == 2 * (2 * 5 - 1)


def test_counts_of_adapters_are_the_formulas_of_their_page():
    """F elements of factors, r (in + out) each; NF4's bytes of every element of a matrix; what is sent for factors alone."""
    rows = fill.results()["lora"]
    found = {name: row["per_rank"][0] for name, row in rows.items()}
    matrices = {(128, 128): 16, (128, 64): 16, (128, 384): 16, (384, 128): 8}  # q o, k v, gate up, down of 8 blocks
    factors = sum(8 * sum(shape) * number for shape, number in matrices.items())
    elements = sum(shape[0] * shape[1] * number for shape, number in matrices.items())
    base = fill.results()["memory"]["one process"]["per_rank"][0]["parameters"]
    alone, quantized = found["LoRA, one process"], found["NF4, one process"]
    assert alone["parameters"] == base + 4 * factors
    assert alone["gradients"] == alone["states"] // 2 == 4 * factors
    assert alone["parameters"] - quantized["parameters"] == 4 * elements - 17 * elements // 32
    for name in ("LoRA, DDP", "LoRA, ZeRO-3", "NF4, ZeRO-3"):
        ranks = 1 if name == "LoRA, DDP" else 4
        assert found[name]["gradients"] == 4 * factors // ranks
    assert found["LoRA, DDP"]["sent"]["all-reduce"]["payload"] == 4 * factors + 12
    # a micro-batch: 1 and 2 numbers per token of the head, the whole factor of 7 matrices in 8 blocks; a step: the clip
    assert found["LoRA, tp 4"]["sent"]["all-reduce"]["calls"] == 8 * (2 + 7 * 8) + 1
