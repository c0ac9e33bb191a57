"""A canvas for the drawings of docs/techniques/: boxes, words, arrows and bars as SVG, readable on light and on dark pages.

A drawing is on a card of its own colour, which follows the reader's preference, so it can be read whatever the page around it
looks like. Colours have names that say what they stand for in all drawings.
"""

from collections.abc import Iterable, Sequence
from html import escape

# what it means -> (light, dark)
COLOURS = {
    "card": ("#fcfcfa", "#1e2127"),
    "ink": ("#22252a", "#e4e6ea"),
    "faint": ("#7a808a", "#9aa1ad"),
    "line": ("#b9bec7", "#4b515c"),
    "empty": ("#eceef1", "#2b2f37"),
    "parameters": ("#a9c7f0", "#3d6299"),
    "gradients": ("#f3c69a", "#8f5a24"),
    "states": ("#b8dcb0", "#3f7038"),
    "kept": ("#dcc1ea", "#71498a"),
    "sent": ("#f2aaa5", "#96403a"),
    "data": ("#f1e3a0", "#7c6a1c"),
}
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


class Canvas:
    def __init__(self, width: float, height: float, title: str):
        self.width, self.height, self._title = width, height, title
        self._parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, colour: str, words: str = "", size: float = 12) -> None:
        """A filled box with words in its middle; "|" in them starts a new line."""
        self._parts.append(
            f'<rect class="{colour}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" stroke-width="1"/>'
        )
        lines = words.split("|") if words else []
        for index, line in enumerate(lines):
            self.words(x + w / 2, y + h / 2 + size * (0.35 + 1.2 * (index - (len(lines) - 1) / 2)), line, size)

    def words(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 12,
        anchor: str = "middle",
        colour: str = "ink",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        place = f'x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"{weight}'
        self._parts.append(f'<text class="{colour}" {place}>{escape(text)}</text>')

    def line(self, points: Iterable[Sequence[float]], arrow: bool = False, dashed: bool = False) -> None:
        joined = " ".join(f"{x:g},{y:g}" for x, y in points)
        end = ' marker-end="url(#head)"' if arrow else ""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(f'<polyline class="stroke" points="{joined}" fill="none" stroke-width="1.4"{end}{dashes}/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> None:
        self.line([(x1, y1), (x2, y2)], arrow=True, dashed=dashed)

    def legend(self, x: float, y: float, names: dict[str, str]) -> None:
        """Colour -> what it means, in one row."""
        for colour, name in names.items():
            self.box(x, y - 10, 14, 12, colour)
            self.words(x + 20, y, name, 12, "start")
            x += 38 + 6.6 * len(name)

    def svg(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" '
            f'height="{self.height:g}" role="img" font-family="{FONT}">\n<title>{escape(self._title)}</title>\n'
            f"<style>{_style(0)}@media (prefers-color-scheme: dark) {{{_style(1)}}}</style>\n"
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path class="faint" d="M0,0 L8,4 L0,8 z"/></marker></defs>\n'
            f'<rect class="card" x="0.5" y="0.5" width="{self.width - 1:g}" height="{self.height - 1:g}" rx="8"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


def _style(which: int) -> str:
    fills = "".join(f".{name} {{ fill: {colours[which]} }} " for name, colours in COLOURS.items())
    line = COLOURS["line"][which]
    return f"{fills}rect {{ stroke: {line} }} .stroke {{ stroke: {COLOURS['faint'][which]} }} "
