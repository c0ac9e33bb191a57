"""What is counted of a set is logged while it is written. (The figures themselves: test_prepare, test_write_set.)"""

from tests.data.conftest import data_config
from windlass.data.prepare import counted_set
from windlass.data.prepare.prepare import prepare


def test_progress_is_logged_while_a_set_is_encoded(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(counted_set, "REPORT_EVERY_S", -1.0)
    lines = []
    prepare(data_config(tmp_path), {}, log=lines.append)
    assert any(line.startswith("train: ") and "/s, " in line and line.endswith(" left") for line in lines)
