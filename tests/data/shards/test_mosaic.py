"""MosaicML's own library reads what we write, and ours reads what it writes: the committed transcript, made again."""

import importlib.util
import sys

import pytest

from tests.test_map import ROOT

THEIRS = ROOT / ".venv-mosaic" / "bin" / "python"


@pytest.mark.long
@pytest.mark.skipif(not THEIRS.exists(), reason="no .venv-mosaic: sh scripts/mosaic_environment.sh makes it")
def test_both_libraries_agree_on_every_token_as_the_transcript_says(tmp_path, monkeypatch):
    path = ROOT / "benchmarks" / "mosaic_agree.py"
    spec = importlib.util.spec_from_file_location("mosaic_agree", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mosaic_agree", module)
    spec.loader.exec_module(module)
    lines = module.agree(tmp_path)
    assert lines == (ROOT / "benchmarks" / "results" / "mosaic_agree.txt").read_text().splitlines()[1:]
    assert sum(line.endswith("equal") for line in lines) == 21 and not any("DIFFERENT" in line for line in lines)
