"""Rows as text: arrays, lines and single objects of JSON, CSV and TSV, and what becomes of a bad row in each."""

import gzip
import json
import random

import pytest

from tests.data.sources.test_scan import read, refused
from windlass.data.config import SourceConfig
from windlass.data.sources import text_rows as room
from windlass.data.sources.bad_rows import BadRows
from windlass.data.sources.config import BadRowsConfig
from windlass.data.sources.scan import scan
from windlass.data.sources.source_files import source_of_files

TEXTS = ["first \U0001fa9d\r\n", "", 'a, "quoted" b', "third\n\n[{]}"]
GOOD = [text for text in TEXTS if text]


def put(path, text):
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


class Noted(BadRows):
    """And all of them, in order."""

    def _add(self, row):
        self.rows.append(row)
        return super()._add(row)


def judged(path, **source):
    """(texts, the kinds and names of bad rows) of a file."""
    config = SourceConfig(path=str(path), **source)
    found = Noted("sources.0", "a", BadRowsConfig(at_most=99))
    found.rows = []
    texts = list(source_of_files(config, scan(config, print))._replace(bad_rows=found).documents())
    return texts, [(row.kind, row.given.removeprefix(f"{path}")) for row in found.rows]


FORMS = {
    "array": json.dumps([{"text": text} for text in TEXTS]),
    "indented": "\ufeff \n\n" + json.dumps([{"text": text} for text in TEXTS], indent=2) + "\n",
    "first-line": "[" + ",\n".join(json.dumps({"text": text}) for text in TEXTS) + "]",
    "lines": "\ufeff\n" + "\n\n".join(json.dumps({"text": text}) for text in TEXTS),
}


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("form", FORMS)
def test_json_is_an_array_or_lines(tmp_path, form, end, monkeypatch):
    put(tmp_path / f"a.json{end}", FORMS[form])
    assert read(path=str(tmp_path)) == GOOD
    monkeypatch.setattr(room, "AT_ONCE", 1)  # every value is cut somewhere
    assert read(path=str(tmp_path), rows="1:3") == [TEXTS[2]]


def test_one_object_is_one_row_and_a_file_of_its_own(tmp_path):
    for number in range(3):
        put(tmp_path / f"{number}.json", json.dumps({"id": number, "text": f"document {number}"}, indent=2))
    assert read(path=str(tmp_path)) == ["document 0", "document 1", "document 2"]


def test_an_array_of_many_rows_is_read_row_by_row(tmp_path):
    draw = random.Random(3)
    texts = [draw.choice(["x", "é", '"', "\\"]) * draw.choice([1, 70, 400_000]) for _ in range(60)]
    put(tmp_path / "a.json", json.dumps([{"text": text} for text in texts], ensure_ascii=False))
    assert read(path=str(tmp_path)) == texts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"text": "a"}, {"text": "b"', "a.json, row 2, is not JSON: "),
        ('[{"text": "a"} {"text": "b"}]', 'a.json is not JSON: `,` is missing before \'{"text": "b"}]\''),
        ('[{"text": "a"},]', "a.json, row 2, is not JSON: "),
        ('[{"text": "a"}] more', "a.json is not JSON: text behind the array"),
        ("[", "a.json, row 1, is not JSON: "),
        ('{\n"text": "a"', "a.json is not JSON: "),
        ("no JSON at all", "a.json is not JSON: "),
        (
            "[" + '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}]",
            "a.json, row 1, is not JSON: maximum recursion depth",
        ),
    ],
)
def test_what_is_none_of_them_is_refused_as_a_file(tmp_path, text, said):
    put(tmp_path / "a.json", text)
    error = refused(path=str(tmp_path), bad_rows={"at_most": 9})
    assert said in error.given and error.change.startswith("fix the file; or write JSON lines")


def test_bad_rows_of_an_array_and_of_lines_have_their_names(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "AT_ONCE", 1)  # the number is cut too
    put(tmp_path / "a.json", '[\n{"text": "a"}, 77, {"text": null}, {"txt": "b"}, {"text": "c"}]')
    assert judged(tmp_path / "a.json") == (
        ["a", "c"],
        [
            ("wrong type", ", row 2, is int, not an object"),
            ("null", ", row 3, has nothing under `text`"),
            ("missing key", ", row 4, has no key `text`"),
        ],
    )
    put(tmp_path / "a.json", '{"text": "a"}\n{"text": \n{"text": "c"}\n')
    texts, bad = judged(tmp_path / "a.json")
    assert texts == ["a", "c"] and bad[0][0] == "not JSON" and bad[0][1].startswith(":2 is not JSON")


def test_a_row_of_an_array_that_is_too_large_is_refused(tmp_path):
    put(tmp_path / "a.json", json.dumps([{"text": "x" * (1 << 20)}, {"text": "y" * (7 << 20)}]))
    assert len(read(path=str(tmp_path))) == 2
    assert refused(path=str(tmp_path), max_row_mib=2).given.endswith(
        "a.json, row 2, is not JSON, or is a row of more than 2 MiB"
    )


def cells(text):
    return '"' + text.replace('"', '""') + '"'


@pytest.mark.parametrize(("name", "comma"), [("a.csv", ","), ("a.tsv", "\t"), ("a.csv.gz", ",")])
def test_a_table_as_text_is_read_by_its_column(tmp_path, name, comma):
    rows = [f"{number}{comma}{cells(text)}" for number, text in enumerate(TEXTS)]
    put(tmp_path / name, "\ufeffid" + comma + "body\n" + "\r\n\r\n".join(rows) + "\n")
    assert read(path=str(tmp_path), text="body") == GOOD
    assert read(path=str(tmp_path), text="body", rows="1:3") == [TEXTS[2]], (
        "a blank line is no row, an empty cell is one"
    )
    assert refused(path=str(tmp_path)).given == f"{tmp_path}/{name} has no column `text`"
    assert read(path=str(tmp_path), text="id") == ["0", "1", "2", "3"], "cells are texts"


def test_bad_rows_of_csv_have_their_line(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'id,text\n1,"two\nlines"\n2\n3,caf\xe9\n4,"a"b\n5,last\n')
    texts, bad = judged(tmp_path / "a.csv")
    assert texts == ["two\nlines", "last"]
    assert bad == [
        ("of other columns", ":4 has 1 cells, and there are 2 columns"),
        ("not UTF-8", ":5 is not UTF-8: byte 0xe9"),
        ("not CSV", ":6 cannot be read: ',' expected after '\"'"),
    ]


def test_a_quote_that_is_never_closed_and_a_name_twice_are_no_bad_rows(tmp_path):
    put(tmp_path / "a.csv", 'text\none\n"two\nthree\n')
    assert refused(path=str(tmp_path), bad_rows={"at_most": 9}).given.startswith(
        f"{tmp_path}/a.csv:3 begins a quoted cell that is not closed"
    )
    put(tmp_path / "a.csv", "text,text\none,two\n")
    assert refused(path=str(tmp_path)).given.endswith("has several columns of one name: text, text")
    put(tmp_path / "a.csv", "")
    assert read(path=str(tmp_path)) == []


def test_cells_may_be_a_conversation(tmp_path):
    put(tmp_path / "a.csv", "prompt,completion\nWhy?,Wind.\n")
    (text,) = read(path=str(tmp_path), format="chat")
    assert [message["content"] for message in json.loads(text)] == ["Why?", "Wind."]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_line_that_is_not_utf8_is_converted_with_its_file_and_not_by_its_number(tmp_path, name):
    begin = b"text\n" if name == "a.csv" else b'{"text": "x"}\n'
    (tmp_path / name).write_bytes(begin + (b"caf\xe9\n" if name == "a.csv" else b'{"text": "caf\xe9"}\n'))
    error = refused(path=str(tmp_path / name))
    assert error.given.startswith(f"{tmp_path / name}:2 is not UTF-8: byte 0xe9")
    assert error.change == (
        "fix the line; or, if all of the file is in another encoding, "
        f"convert it: iconv -f LATIN1 -t UTF-8 {tmp_path / name}"
    )


def test_a_text_that_is_not_utf8_is_converted(tmp_path):
    (tmp_path / "a:12").write_bytes(b"caf\xe9")
    assert refused(path=str(tmp_path)).change == f"convert it: iconv -f LATIN1 -t UTF-8 {tmp_path / 'a:12'}"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_the_rule_of_lines_holds_whatever_the_file_is_called(tmp_path, name):
    (tmp_path / name).write_text(json.dumps({"text": "x"}) + "\n7\n")
    error = refused(path=str(tmp_path / name))
    assert (error.given, error.rule) == (
        f"{tmp_path / name}:2 is int, not an object",
        "each line of the file is an object whose key `text` holds the text",
    )
