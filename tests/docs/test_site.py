"""docs/ as a site: every page is in the tables of index.md, every link leads somewhere, and Sphinx makes it without a warning."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SPHINX = ROOT / ".venv-site" / "bin" / "sphinx-build"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(
    r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)|<(?:img|source)[^>]*? (?:src|srcset)=\"([^\"]+)\""
)


def written(page):
    """Without blocks of code, whose brackets are no links."""
    return re.sub(r"^```.*?^```|^    .*?$|`[^`\n]*`(?!\])", "", page.read_text("utf-8"), flags=re.S | re.M)


def anchors(page):
    """What GitHub and the site call a page's headings."""
    titles = re.findall(r"^#{1,6} (.+)$", re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.S | re.M), re.M)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", t).lower()).replace(" ", "-") for t in titles
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    dead = []
    for found in LINK.finditer(written(page)):
        target = next(part for part in found.groups() if part)
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    assert dead == []


def test_links_and_headings_are_seen():
    assert {m[1] or m[2] for m in LINK.finditer("a [b](c.md#d) ![e](f.png) [`g`](h.py)")} == {"c.md#d", "f.png", "h.py"}
    assert "when-memory-runs-out" in anchors(DOCS / "howto" / "restarts.md")


def test_every_page_is_in_the_tables_of_the_first():
    linked = re.findall(r"\]\(([\w/.-]+\.md)\)", (DOCS / "index.md").read_text())
    assert sorted(linked) == sorted(set(linked)), "each once"
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"index.md"}
    assert pages == set(linked)


@pytest.mark.long
def test_sphinx_makes_the_site_without_a_warning(tmp_path):
    if not SPHINX.exists():
        pytest.skip("needs .venv-site: sh scripts/site_environment.sh")
    options = ["--quiet", "--nitpicky", "--fail-on-warning", "--keep-going", "-c", str(DOCS / "site")]
    done = subprocess.run([str(SPHINX), *options, str(DOCS), str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    made = {str(page.relative_to(tmp_path)) for page in tmp_path.rglob("*.html")}
    assert {str(page.relative_to(DOCS).with_suffix(".html")) for page in DOCS.rglob("*.md")} <= made
    assert "searchindex.js" in {file.name for file in tmp_path.iterdir()}
    navigation = (tmp_path / "troubleshooting.html").read_text()
    assert navigation.count('class="caption"') == 7 and "howto/slurm.html" in navigation
    asked = [url for page in tmp_path.rglob("*.html") for url in re.findall(r'(?:src|href)="(https?:[^"]+)"', page.read_text())
             if 'rel="stylesheet"' in url or re.search(r"\.(js|css|woff2?)\b", url)]  # fmt: skip
    assert asked == [], "a page asks no other origin"
