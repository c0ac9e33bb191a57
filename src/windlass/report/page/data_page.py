"""The page of prepared data: `windlass data report`. Bars are table cells with a width, so that the page needs no script.

As report.html it is one file, loads nothing, and escapes every text of the data. What it shows is an Overview of data/lint.
"""

import json
from typing import Any, Final

from windlass.report.page.write import filled, style
from windlass.units import format_bytes, format_count

COLOURS: Final = 8


def data_page(found: Any) -> str:
    """The whole page. `found`: an Overview."""
    return filled(
        "data.html.j2",
        found=found,
        prepared=found.prepared,
        name=found.prepared.where.rstrip("/").rpartition("/")[2] or found.prepared.where,
        style=style(),
        format_bytes=format_bytes,
        format_count=format_count,
        colours=COLOURS,
        settings=json.dumps(found.prepared.settings, indent=1, ensure_ascii=False),
    )
