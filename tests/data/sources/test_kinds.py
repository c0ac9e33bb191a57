"""What is not of the kind that the settings of a source speak of has a name, and so has what to do."""

from pathlib import Path

import pytest

from windlass.data.config import SourceConfig
from windlass.data.sources.kinds import binary_file, check_kinds, few
from windlass.errors import UserError


def refused(paths, outright=(), **source):
    with pytest.raises(UserError) as caught:
        check_kinds(SourceConfig(path="x", **source), paths, set(outright))
    return caught.value


def test_the_first_names_are_told():
    assert few([]) == "" and few("abc") == "a, b, c" and few("abcd") == "a, b, c, ..."


def test_rows_in_other_ways_are_refused_unless_named_among_texts():
    assert refused(["a.txt", "s3://x/b.csv"]).given.startswith("1 of 2 files (s3://x/b.csv) would be read as")
    assert (
        refused(["b.csv"], ["b.csv"]).given == "b.csv would be read as one text, and its name says that it holds rows"
    )
    check_kinds(SourceConfig(path="x"), ["a.txt", "b.csv"], {"b.csv"})


def test_settings_of_rows_need_files_of_rows():
    assert refused(["a.txt"], text="body").given == "`text: body` with x"
    assert refused(["a.jsonl", "a.txt"], format="chat").change == "name the files by a glob: chat/*.jsonl"
    check_kinds(SourceConfig(path="x", text="body"), ["a.jsonl", "a.txt"], set())


def test_a_binary_file_is_named():
    assert binary_file(Path("a.jsonl")).given == "a.jsonl is a binary file (it holds NUL bytes)"
