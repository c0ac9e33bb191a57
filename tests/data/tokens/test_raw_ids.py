"""Raw files of ids: their width is given or in llm.c's header, never guessed."""

import pytest

from tests.data.tokens import writers
from windlass.data.tokens import raw_ids
from windlass.data.tokens.raw_ids import raw_rows
from windlass.errors import UserError

DOCUMENTS = writers.some_documents(0, 30)


def refusal(path, id_type=None):
    with pytest.raises(UserError) as caught:
        list(raw_rows(path, id_type))
    return caught.value


def test_ids_come_in_pieces_with_their_positions(tmp_path, monkeypatch):
    monkeypatch.setattr(raw_ids, "IDS_AT_ONCE", 100)
    writers.nanogpt(tmp_path / "x.bin", DOCUMENTS, 0, "<u4")
    rows = list(raw_rows(tmp_path / "x.bin", "uint32"))
    assert [id for row in rows for id in row.ids.tolist()] == [id for one in DOCUMENTS for id in (*one, 0)]
    assert [row.first for row in rows] == list(range(0, sum(map(len, DOCUMENTS)) + 30, 100))


def test_a_header_says_how_wide_an_id_is(tmp_path):
    writers.llm_c(tmp_path / "x.bin", DOCUMENTS, 0, 20240801, 7, "I")
    (row,) = raw_rows(tmp_path / "x.bin", None)
    assert row.ids.tolist() == [id for one in DOCUMENTS for id in (0, *one)]
    assert "whose header says uint32" in refusal(tmp_path / "x.bin", "uint16").given
    writers.llm_c(tmp_path / "x.bin", DOCUMENTS, 0, version=3)
    assert "has llm.c's header of version 3" in refusal(tmp_path / "x.bin").given


def test_what_is_not_whole_is_refused(tmp_path):
    writers.nanogpt(tmp_path / "x.bin", DOCUMENTS, 0)
    assert refusal(tmp_path / "x.bin").given.endswith("is raw ids, and nothing says how wide one is")
    (tmp_path / "x.bin").write_bytes((tmp_path / "x.bin").read_bytes()[:-1])
    assert "has 1 bytes behind " in refusal(tmp_path / "x.bin", "uint16").given
    writers.llm_c(tmp_path / "y.bin", DOCUMENTS, 0)
    (tmp_path / "y.bin").write_bytes((tmp_path / "y.bin").read_bytes()[:-2])
    assert refusal(tmp_path / "y.bin").rule == f"its header promises {sum(map(len, DOCUMENTS)) + 30}"
