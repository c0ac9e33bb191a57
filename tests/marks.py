"""Which cells of a table are quick. Apart from cases.py, which ranks import: pytest would cost each of them time."""

import pytest
from _pytest.mark import ParameterSet


def quick_once(rows: list[tuple]) -> list[ParameterSet]:
    """Rows of a table of bugs, each one beginning with the bug: quick where the bug stands first, long where it comes again."""
    first = {row[0]: row for row in reversed(rows)}
    return [pytest.param(*row, marks=() if first[row[0]] is row else pytest.mark.long) for row in rows]
