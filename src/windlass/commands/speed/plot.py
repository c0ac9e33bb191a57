"""A bar for each cell of a bench, as one SVG file that any browser opens."""

import html
from collections.abc import Sequence
from typing import Final

from windlass.units import format_count

ROW, BAR, LEFT, WIDTH = 26, 16, 380, 900
TEXT: Final = 'font-family="sans-serif" font-size="12"'


def plot(bars: Sequence[tuple[str, float | None]], title: str) -> str:
    """`bars`: label and value; None for a cell without one, which keeps its place."""
    most = max((value for _, value in bars if value is not None), default=1.0)
    height = ROW * (len(bars) + 1) + 10
    parts = [f'<text x="{LEFT}" y="18" {TEXT} font-weight="bold">{html.escape(title)}</text>']
    for number, (label, value) in enumerate(bars, 1):
        top = ROW * number
        parts.append(f'<text x="{LEFT - 8}" y="{top + 13}" text-anchor="end" {TEXT}>{html.escape(label)}</text>')
        length = 0.0 if value is None else (WIDTH - LEFT - 90) * value / most
        words = "no figure" if value is None else format_count(value)
        parts.append(f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR}" fill="#4878a8"/>')
        parts.append(f'<text x="{LEFT + length + 6:.1f}" y="{top + 13}" {TEXT}>{words}</text>')
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">\n{body}\n</svg>\n'
