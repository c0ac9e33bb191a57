"""What is counted of a set is logged while it is written. (The figures themselves: test_prepare, test_write_set.)"""

from tests.data.conftest import data_config
from windlass.data.prepare import counted_set
from windlass.data.prepare.prepare import prepare


def test_progress_is_logged_while_a_set_is_encoded(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(counted_set, "REPORT_EVERY_S", -1.0)
    lines = []
    prepare(data_config(tmp_path), {}, log=lines.append)
    assert any(line.startswith("train: ") and "/s, " in line and line.endswith(" left") for line in lines)


def test_after_the_sets_a_line_says_that_baselines_are_made(corpus, tmp_path):
    lines = []
    prepared = prepare(data_config(tmp_path), {}, log=lines.append)
    assert "gzip" in prepared.baselines
    of_set, after = (
        next(n for n, line in enumerate(lines) if line.startswith(start)) for start in ("validation: ", "baselines: ")
    )
    assert of_set < after and lines[after].startswith("baselines: what a model must beat on ")
