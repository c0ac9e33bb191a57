"""The pages that a newcomer reads: short paragraphs, the field's words, and no file that is not in the tree."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DESIGN = DOCS / "design.md"
NAMING = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", DESIGN,
          *(DOCS / name for name in ("map.md", "walkthrough.md", "recipe.md", "support.md", "questions.md")),
          *sorted(DOCS.glob("howto/*.md")), *sorted(DOCS.glob("techniques/*.md"))]  # fmt: skip
WRITTEN = [
    page for page in NAMING if page.name not in ("recipe.md", "support.md")
]  # the others are made from docstrings
# no files of the tree are named there, or those of a run alone
WRITTEN += [
    DOCS / f"{name}.md" for name in ("index", "troubleshooting", "performance", "scale", "errors", "glossary", "claims")
]
PATH = re.compile(r"`((?:[\w-]+/)+(?:[\w-]+\.\w+)?|[\w-]+\.py)`")
ELSEWHERE = ("base/", "checkpoints/", "models/", "configuration_", "modeling_")  # of a run, and of transformers
COINED = re.compile(
    r"\b(told|tells?|lies?|capsules?|twins?|census|lease|truth|arrivals?|is said|are said|so many|what is none|stands?|stood)\b"
    r"|_told|told_"
)


def prose(page):
    """The page without what is filled in from the source."""
    return re.sub(r"^```.*?^```|^    .*?$", "", page.read_text("utf-8"), flags=re.S | re.M)


def is_there(path, page):
    """From the repository, the source or the page's own folder; a room inside a room by its own name too."""
    source = ROOT / "src" / "windlass"
    rooms = [folder for folder in source.iterdir() if path.endswith("/")]  # `sources/` in the row of `data/`
    return any((folder / path).exists() for folder in (ROOT, source, page.parent, *rooms))


def test_the_design_lists_every_dependency_and_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    names = {re.match(r"[\w-]+", one)[0] for one in project["dependencies"]}
    given, extras = DESIGN.read_text("utf-8").split("## 15. Dependencies")[1].split("Extras, each for one feature:")
    assert set(re.findall(r"[\w-]+", re.sub(r"\(.*?\)", "", given))) == names
    assert set(re.findall(r"`([\w-]+)`", extras.split(". ")[0])) == set(project["optional-dependencies"]) - {"dev"}


def test_design_is_narrow_and_its_paragraphs_are_short():
    text = DESIGN.read_text("utf-8")
    assert [line for line in text.splitlines() if len(line) > 160] == []
    paragraphs = text.split("\n\n")
    assert len(paragraphs) > 100
    assert [paragraph for paragraph in paragraphs if len(paragraph.split()) > 120 and paragraph[0] != "|"] == []


@pytest.mark.parametrize("page", NAMING, ids=lambda page: page.name)
def test_pages_name_only_files_that_exist(page):
    named = [path for path in PATH.findall(page.read_text("utf-8")) if not path.startswith(ELSEWHERE)]
    assert sorted({path for path in named if not is_there(path, page)}) == []


def test_a_name_of_a_file_is_seen_where_it_is_one():
    text = "`data/order.py`, `loss.py`, `stream/`, `data.order.first_epoch`, `org/name`, `a / b`, `prepared.json`"
    assert PATH.findall(text) == ["data/order.py", "loss.py", "stream/"]


def test_docstrings_and_messages_use_the_words_of_the_field():
    folders = [ROOT / name for name in ("src", "benchmarks", "scripts", "tests")]
    files = {path for folder in folders for ending in ("py", "j2", "js", "sh") for path in folder.rglob(f"*.{ending}")}
    found = []
    for file in sorted(files - {Path(__file__)}):
        text = re.sub(r"\btell\(|[Gg]round.truth", "", file.read_text("utf-8"))  # Python's name, of files; a script's
        lines, where = text.splitlines(), file.relative_to(ROOT)
        found += [
            f"{where}:{at}: {word[0]}: {line}" for at, line in enumerate(lines, 1) if (word := COINED.search(line))
        ]
    assert not found, "\n" + "\n".join(found)


def docstrings_without_a_verb(text):
    """The lines of Python source on which a docstring begins with "Of ", or with a word for something that was named before."""
    begin = r'\s*r?"""(?:Of|The same|Those|As|Its?|Them|They|Theirs?|And)\b'
    return [at for at, line in enumerate(text.splitlines(), 1) if re.match(begin, line)]


def test_no_docstring_needs_the_one_above():
    files = (ROOT / "src").rglob("*.py")
    found = [f"{file.relative_to(ROOT)}:{at}" for file in sorted(files)
             for at in docstrings_without_a_verb(file.read_text("utf-8"))]  # fmt: skip
    assert not found, "say what it returns, does or is:\n" + "\n".join(found)


def test_a_docstring_that_needs_the_one_above_is_seen():
    text = 'def f():\n    """Of a step."""\n    """Often."""\n\nx = 1\nr"""Of all."""\n"""The same, of a run."""\n"""Itself."""'
    assert docstrings_without_a_verb(text) == [2, 6, 7]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_pages_use_the_words_of_the_field(page):
    found = [f"{match[0]}: {line}" for line in prose(page).splitlines() if (match := COINED.search(line))]
    assert not found, "\n" + "\n".join(found)
