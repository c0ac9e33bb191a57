"""The bars of a bench: one for each cell, the longest for the most, and a place for a cell without a figure."""

import re

from windlass.commands.speed.plot import plot


def test_bars_are_as_long_as_their_values_and_names_are_escaped():
    drawn = plot([("a<b", 200.0), ("half", 100.0), ("broken", None)], "tokens per second")
    whole, half, none = (float(width) for width in re.findall(r'<rect .*? width="([\d.]+)"', drawn))
    assert (half, none) == (whole / 2, 0.0)
    assert "a&lt;b" in drawn and ">no figure<" in drawn and ">200<" in drawn
    assert plot([("x", None)], "t").count("<rect") == 1
