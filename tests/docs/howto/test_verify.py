"""The page on proofs names every row that a proof has, in its order, and no other."""

import re
from pathlib import Path

import pytest

from tests.proof.test_verify import FAMILIES, LAYOUTS, prove

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "prove-a-layout.md"


@pytest.mark.long
def test_every_row_is_explained(tmp_path, ranks):
    rows = re.findall(r"^\| ([^|]+?) \| ", PAGE.read_text(), re.M)[1:]
    verdict = prove(tmp_path, ranks, FAMILIES["qwen3_moe"], LAYOUTS["ddp2"] | {"zero": 1, "replicate": 1, "shard": 2})
    assert verdict.agrees and rows == [row.what for row in verdict.rows]
