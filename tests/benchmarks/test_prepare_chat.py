"""benchmarks/prepare_chat.py: docs/design.md gives the parent's shares of its rows, which are within what is wanted."""

import json

from tests.docs.test_techniques import DOCS, ROOT, beside

script = beside(ROOT / "benchmarks", "prepare_chat")
PARENT = {name: row for name, row in json.loads(script.RESULTS.read_text()).items() if name.startswith("parent, ")}


def in_words(key):
    *first, last = (f"{100 * row[key]:.1f}" for row in PARENT.values())
    return f"{', '.join(first)} and {last} %"


def test_the_design_gives_the_shares_that_were_measured():
    page = " ".join((DOCS / "design.md").read_text("utf-8").split())
    assert list(PARENT) == ["parent, 10 MB", "parent, 40 MB", "parent, 160 MB", "parent, 1000 MB"]
    assert PARENT["parent, 1000 MB"]["parent_share"] <= 0.03
    assert f"its share is {in_words('parent_share')} with two workers" in page
    assert f"without that {in_words('parent_share_less_fixed')} (" in page


def test_the_page_gives_the_rates_that_were_measured_and_each_is_what_is_wanted():
    results, page = json.loads(script.RESULTS.read_text()), (DOCS / "howto" / "prepare-data.md").read_text("utf-8")
    for name in script.TEMPLATES:
        fast, slow = (
            [results[f"{name}, {turns} turns, {way}"]["mb_per_cpu_s"] for turns in script.TURNS]
            for way in ("tiktoken", "tokenizers")
        )
        cells = [f"{one:.1f} ({other:.1f})" for one, other in zip(fast, slow, strict=True)]
        assert f"| {name} | {' | '.join(cells)} | " in page
        assert min(fast) >= script.WANTED_MB
    least = min(row["tokens"] for row in results.values() if isinstance(row, dict) and "tokens" in row)
    assert least > 100_000, "ids are counted, not the fields of what the encoder returns"


def test_the_page_gives_the_rates_of_what_costs_more():
    results, page = (
        json.loads(script.RESULTS.read_text())["harder"],
        (DOCS / "howto" / "prepare-data.md").read_text("utf-8"),
    )
    said = " ".join(page.split())
    for name in script.HARDER:
        first, second, third = (f"{results[f'{name}, {turns} turns']['mb_per_cpu_s']:.1f}" for turns in script.TURNS)
        assert f"{first}, {second} and {third} MB" in said, name


def test_less_what_is_fixed_the_parent_does_three_percent_at_most():
    assert max(row["parent_share_less_fixed"] for row in PARENT.values()) <= 0.03


def test_conversations_have_their_turns_and_are_as_many_as_asked_for():
    rows = [json.loads(row) for row in script.conversations(["word"] * 5000, 4, 20_000)]
    assert all([message["role"] for message in row] == ["system", *["user", "assistant"] * 4] for row in rows)
    assert 20_000 <= sum(len(json.dumps(row, ensure_ascii=False).encode()) for row in rows) < 30_000
