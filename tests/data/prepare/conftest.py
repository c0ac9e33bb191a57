"""Sources of many shapes, and chunks so small that each has many."""

import gzip
import json

import pytest

from tests.data.conftest import make_text, write_corpus
from windlass.data import verified_file
from windlass.data.prepare import chunk_tasks
from windlass.data.sources import formats, source_files

BAD = ('{"text": ', '{"text": null}', "[]", '{"text": "\\ud800"}', '{"no": 1}')


def write_rows(path, num_rows, seed, bad=()):
    texts = [make_text(num_words=(seed + number) % 40, seed=1000 * seed + number) for number in range(num_rows)]
    lines = [json.dumps({"text": text}) for text in texts]
    for number, line in enumerate(bad):
        lines.insert((number + 1) * num_rows // 6, line)
    path.write_text("\n".join(["", *lines, ""]))


@pytest.fixture
def sources(tmp_path):
    """Lines with bad ones among them, a packed file of lines, a folder of texts; the first ones also limited and mixed."""
    write_rows(tmp_path / "a.jsonl", 300, 1, BAD)
    write_rows(tmp_path / "b.jsonl", 200, 2)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "b.jsonl").read_bytes(), mtime=0))
    write_corpus(tmp_path / "corpus")
    allowed = {"at_most": len(BAD), "report": str(tmp_path / "report")}
    return [{"path": str(tmp_path / name)} for name in ("b.jsonl.gz", "corpus")] + [
        {"path": str(tmp_path / "a.jsonl"), "bad_rows": allowed}
    ]


def cut_small(set_attribute):
    """Files are cut into chunks of a kilobyte."""
    for room in (verified_file, formats, source_files):
        set_attribute(room, "BLOCK_BYTES", 512)
    set_attribute(formats, "CHUNK_BLOCKS", 2)
    set_attribute(formats, "MIB", 1024)
    set_attribute(source_files, "MIB", 1024)  # of max_row_mib
    set_attribute(chunk_tasks, "CHARS_AT_ONCE", 300)


@pytest.fixture
def small_chunks(monkeypatch):
    """Call it, and files are cut into chunks of a kilobyte."""
    return lambda: cut_small(monkeypatch.setattr)
