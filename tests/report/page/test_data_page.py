"""The page of prepared data: the numbers of prepared.json, nothing from outside, whatever a text holds; a phone needs no bar."""

import html
import json
import re

import pytest
from markupsafe import escape

from tests.data.conftest import data_config, make_text
from tests.data.prepare.test_prepare import quietly
from tests.report.page.test_page_js import AUDIT, AXE, POLICY
from tests.report.page.test_page_js import browse as browse  # a fixture
from tests.report.page.test_write import Page
from windlass.data.lint.findings import Finding
from windlass.data.lint.lint import Coverage, LintResult
from windlass.data.lint.overview import overview
from windlass.report.page.data_page import data_page

EVIL = "</script><script>document.title='broken out'</script><img src=x onerror=alert(1)>"
FINDINGS = [Finding("eos-doubled", "train: sample 1", EVIL, 1), Finding("documents-cut", "train", "long", 2)]
COVERAGE = [Coverage("train", 1234, 5678, 9, 9)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two sources that are mixed, hostile in every text and name."""
    root = tmp_path_factory.mktemp("page")
    texts = [f"{number} {make_text(20 + 9 * (number % 5), number)}" for number in range(40)]
    rows = [[EVIL, *texts[:20], f"{texts[4]} more", "one", EVIL], texts[20:]]
    for number, documents in enumerate(rows):
        (root / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*documents, None]))
    names = (EVIL, "a name that is very long, and longer than a phone is wide, so that it must be wrapped")
    source = {"bad_rows": {"at_most": 1}, "filters": {"min_words": 2}}
    sources = [{"path": str(root / f"{n}.jsonl"), "name": names[n], "weight": 3 - 2 * n, **source} for n in range(2)]
    config = data_config(root, sources=sources, deduplicate={"similarity": 0.8}, validation=0.3)
    prepared = quietly(config)
    found = overview(prepared, LintResult(FINDINGS, COVERAGE), config.mixture, config.labels)
    return prepared, found, data_page(found)


def section(page, title):
    """The text of a section, by its heading."""
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", page.split(f"<h2>{title}</h2>")[1].split("<h2>")[0])).split())


def test_sets_and_sources_have_the_amounts_of_the_manifest(made):
    prepared, _, page = made
    words, sources = Page(page).text, section(page, "Sources")
    for name, info in prepared.sets.items():
        assert f"tokens in {info.documents:,} documents" in words
        for documents, tokens in info.by_source:
            assert f"{documents:,} {tokens:,} {100 * tokens / info.tokens:.1f}%" in sources, name
    assert "Mixture share of the training stream" in sources and "75.0%" in sources and "25.0%" in sources


def test_lengths_are_those_of_the_documents(made):
    prepared, found, page = made
    words = section(page, "Lengths")
    for one in found.sets:
        assert sum(count for _, count in one.survey.histogram) == prepared.sets[one.survey.name].documents
        for shortest, count in one.survey.histogram:
            assert f"{shortest:,} to {2 * shortest - 1:,} {count:,}" in words
        assert f"median {one.survey.percentiles[50]:,}" in words


def test_what_was_left_out_has_the_counts_of_the_manifest(made):
    prepared, _, page = made
    words = section(page, "Left out")
    kind = next(iter(prepared.bad_rows["sources.0"]))
    removed, duplicates = prepared.filtered["sources.0"]["min_words"], prepared.duplicates["sources.0"]
    assert removed == 1 and duplicates >= 2
    assert f"bad row: {kind} 1 filter min_words {removed} duplicates {duplicates}" in words
    assert f"bad row: {kind} 1 filter min_words 0 duplicates 0" in words
    near = section(page, "Near-duplicates")
    for pair in prepared.near_pairs:
        title = f"document {pair['left_out']} , similarity {pair['similarity']:.2f} with {pair['kept']}"
        assert title.replace(" ,", ",") in near and pair["left_out_text"][:9] in near


def test_findings_name_what_to_change_and_how_much_was_checked(made):
    words = section(made[2], "Findings")
    assert f"error eos-doubled {EVIL} (train: sample 1): {FINDINGS[0].change}" in words
    assert "train: 1,234 of 5,678 samples were checked." in words
    assert '<tr class="incident"><td>error' in made[2] and "<tr><td>warning" in made[2]


def test_hostile_text_is_text_and_nothing_is_loaded_or_run(made):
    text = made[2]
    page = Page(text)
    assert page.loads == [] and page.handlers == [] and page.scripts == [] and "<img" not in text
    assert page.text.count("document.title='broken out'") >= 5  # source, finding, settings, near copy, sample
    assert "script-src" not in text and "default-src 'none'" in POLICY.search(text)[0]


def test_samples_are_shown_as_they_are_read_and_a_line_ends_each_document(made):
    _, found, text = made
    shown = [part for one in found.sets for sample in one.samples for part in sample.segments]
    assert all(str(escape(part.text)) in text for part in shown if part.kind != "padding")
    lines = section(text, "Samples").count("-----") - 1  # one in the words above
    assert lines == sum(part.kind == "end" for part in shown) > 0


WIDE = """<script>addEventListener("load", () => { const root = document.documentElement;
parent.document.getElementById("found").textContent = JSON.stringify([root.scrollWidth, root.clientWidth]); });</script>"""


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_no_width_needs_a_horizontal_bar(browse, made, width):
    inner = html.escape(POLICY.sub("", made[2]).replace("</body>", WIDE + "</body>"))
    outer = f'<p id="found"></p><iframe style="border:0;width:{width}px;height:900px" srcdoc="{inner}"></iframe>'
    dom, _ = browse(f"<!doctype html><meta charset=utf-8>{outer}", "--window-size=1300,1000")
    wide, room = json.loads(re.search(r'<p id="found">(.*?)</p>', dom)[1])
    assert wide <= room <= width


def test_a_browser_asks_for_nothing_and_complains_of_nothing(browse, made):
    dom, log = browse(made[2])
    assert "broken out</title>" not in dom and "Content Security Policy" not in log and "CONSOLE" not in log


@pytest.mark.long
@pytest.mark.parametrize("scheme", [[], ["--blink-settings=preferredColorScheme=0"]], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1300])
def test_axe_finds_no_fault(browse, made, scheme, width):
    if not AXE.exists():
        pytest.skip("needs axe-core: sh scripts/test_programs.sh")
    page = POLICY.sub("", made[2]).replace("</body>", AUDIT % AXE.read_text() + "</body>")
    dom, _ = browse(page, f"--window-size={width},1000", *scheme)
    found = json.loads(html.unescape(re.search(r'<pre id="audit">(.*?)</pre>', dom, re.S)[1]))
    assert found["faults"] == [] and found["undecided"] == [] and found["passed"] > 20
