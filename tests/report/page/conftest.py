"""A run's events in one file."""

import pytest

from tests.report.page.events import append


@pytest.fixture
def log(tmp_path):
    """Appends events to one file -> its path."""
    return lambda *lines: append(tmp_path / "events.jsonl", *lines)
