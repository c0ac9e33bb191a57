"""The limit of open files is raised as far as the system lets it, and never lowered."""

import resource

import pytest

from windlass.ranks.open_files import MOST_FILES, allow_many_files

NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [
        (1024, 1 << 20, (MOST_FILES, 1 << 20)),
        (1024, 4096, (4096, 4096)),
        (1024, NO_LIMIT, (MOST_FILES, NO_LIMIT)),
        (1 << 20, 1 << 20, None),
        (4096, 4096, None),
        (NO_LIMIT, NO_LIMIT, None),
    ],
)
def test_a_limit_below_what_a_store_needs_is_raised(monkeypatch, soft, hard, wanted):
    given = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: given.append(limits))
    allow_many_files()
    assert given == ([] if wanted is None else [wanted])
