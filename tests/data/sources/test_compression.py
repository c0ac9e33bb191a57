"""A small file cannot fill the memory, whatever it unpacks to."""

import bz2
import gzip
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from tests.data.sources.test_scan import read, refused
from windlass.data.sources import compression

PACK = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstandard.ZstdCompressor().compress}
ROOT = Path(__file__).parents[3]
ATTACKED = """
import resource, sys
import zstandard, zlib, gzip, lzma, bz2
from windlass.data.sources.config import SourceConfig
from windlass.data.sources.scan import scan
from windlass.data.sources.source_files import source_of_files
from windlass.errors import UserError
source = SourceConfig(path=sys.argv[1])
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (200 << 20),) * 2)
try:
    print(sum(map(len, source_of_files(source, scan(source, print)).documents())))
except UserError as error:
    print(error.given)
"""


def attacked(path):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src"}
    done = subprocess.run([sys.executable, "-c", ATTACKED, str(path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("name", "end"), [("a.jsonl", ".gz"), ("a.txt", ".zst"), ("a.txt", ".xz")])
def test_a_small_file_of_one_large_row_takes_no_more_memory_than_the_limit(tmp_path, name, end):
    path = tmp_path / f"{name}{end}"
    path.write_bytes(PACK[end](b" " * (16 << 20)) * 32)  # 512 MiB, in members one behind the other
    assert attacked(path) == f"{path}{':1' if 'jsonl' in name else ''} is a row of more than 64 MiB"


@pytest.mark.parametrize("end", [".gz", ".zst", ".xz", ".bz2"])
def test_a_file_that_unpacks_to_far_more_than_it_is_is_refused(tmp_path, monkeypatch, end):
    path = tmp_path / f"a.jsonl{end}"
    path.write_bytes(PACK[end]((b" " * 1023 + b"\n") * 8192))
    assert read(path=str(path)) == [], "below a gibibyte it may"
    monkeypatch.setattr(compression, "BOMB_BYTES", 1 << 20)
    monkeypatch.setattr(compression, "BOMB_RATIO", 100)
    error = refused(path=str(path))
    assert f" of {path} unpack to more than " in error.given and "at most 100 times its size" in error.rule
    path.write_bytes(PACK[end](os.urandom(1 << 16).hex().encode() * 40))
    assert "not JSON" in refused(path=str(path)).given, "text that repeats itself forty times is none"


def test_a_stream_behind_long_padding_is_read(tmp_path):
    """Padding of xz may be longer than what is read at once, and then it is no end of the file."""
    path, data = tmp_path / "a.jsonl.xz", lzma.compress(b'{"text": "a rope"}\n' * 5000)
    path.write_bytes(data + bytes(3 * compression.PACKED_AT_ONCE) + data)
    assert len(read(path=str(path))) == 10_000


@pytest.mark.parametrize("end", [".xz", ".bz2"])
def test_a_truncated_file_is_damaged_and_padding_of_xz_is_not(tmp_path, end):
    path, data = tmp_path / f"a.jsonl{end}", PACK[end](b'{"text": "a rope"}\n' * 5000)
    path.write_bytes(data + (bytes(8) if end == ".xz" else b""))
    assert len(read(path=str(path))) == 5000
    for broken in (data[:-4], data + data[: len(data) // 2], data[:40] + b"zzzz" + data[44:]):
        path.write_bytes(broken)
        assert f"{path} cannot be unpacked as {compression.KNOWN[end]}: " in refused(path=str(path)).given


def test_the_bounds_are_a_gibibyte_and_a_thousand():
    assert (compression.BOMB_BYTES, compression.BOMB_RATIO) == (1 << 30, 1000)
