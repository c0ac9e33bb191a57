"""docs/questions.md: sixty questions over all rooms, each with one file that exists and that docs/map.md names."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "windlass"
PAGE = (ROOT / "docs" / "questions.md").read_text()
MAP = (ROOT / "docs" / "map.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (.+\?) \| \[`(.+)`\]\(\.\./src/windlass/(.+)\) \|$", PAGE, re.M)


def test_there_are_sixty_questions_with_a_file_each():
    assert [int(number) for number, *_ in ROWS] == list(range(1, 61)) and PAGE.count("\n| ") == 61
    assert [shown for _, _, shown, link in ROWS if shown != link or not (SOURCE / link).is_file()] == []
    assert len({question for _, question, *_ in ROWS}) == len({file for *_, file in ROWS}) == 60


def test_the_questions_lead_into_every_room():
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert rooms <= {file.split("/")[0] for *_, file in ROWS}


def test_the_readme_links_the_page_and_the_map_names_every_answer():
    assert "(docs/questions.md)" in (ROOT / "README.md").read_text()
    blocks = re.split(r"^    (?=\S)", MAP[MAP.index("<!-- map -->") :], flags=re.M)
    rooms = {block.split("/:")[0]: block for block in blocks}
    rooms["."] = next(block for block in blocks if block.startswith("the hall"))
    for *_, file in ROWS:
        assert re.search(rf"^        {Path(file).stem} ", rooms[Path(file).parent.as_posix()], re.M), file
