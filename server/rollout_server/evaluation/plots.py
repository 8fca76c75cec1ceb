"""Plots as plain values: bars with coordinates, which a template draws as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT, _BINS = 320.0, 120.0, 12
_MOST_BARS = 12


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its label, its count, and its rectangle in a plot of 320 by 120 units."""

    label: str
    count: int
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Plot:
    """Bars side by side with a title. `low` and `high` label the ends of the axis; empty if each bar has a name."""

    title: str
    bars: tuple[Bar, ...]
    low: str = ""
    high: str = ""


def histogram(title: str, values: Sequence[float], unit: str = "") -> Plot:
    """Return a histogram of values with up to twelve bins of equal width."""
    if not values:
        return Plot(title, ())
    low, high = min(values), max(values)
    bins = 1 if low == high else _BINS
    width = (high - low) / bins
    if bins == 1 or width == 0 or not math.isfinite(width):
        return Plot(title, _bars([(_number(low, unit), len(values))]), _number(low, unit), _number(high, unit))
    counts = [0] * bins
    for value in values:
        counts[min(int((value - low) / width), bins - 1)] += 1
    labels = [f"{_number(low + i * width, unit)} to {_number(low + (i + 1) * width, unit)}" for i in range(bins)]
    return Plot(title, _bars(list(zip(labels, counts, strict=True))), _number(low, unit), _number(high, unit))


def bar_chart(title: str, counts: Mapping[str, int]) -> Plot:
    """Return a bar for each name, the most frequent first. Beyond twelve, names are combined as "others"."""
    found = sorted(counts.items(), key=lambda item: -item[1])
    others = sum(count for _, count in found[_MOST_BARS - 1 :])
    if len(found) > _MOST_BARS:
        found = [*found[: _MOST_BARS - 1], ("others", others)]
    return Plot(title, _bars(found))


def _bars(counts: Sequence[tuple[str, int]]) -> tuple[Bar, ...]:
    most = max((count for _, count in counts), default=0) or 1
    slot = min(_WIDTH / max(len(counts), 1), _WIDTH / 3)
    heights = [_HEIGHT * count / most for _, count in counts]
    return tuple(
        Bar(label, count, round(index * slot + 1, 2), round(_HEIGHT - height, 2), round(slot - 2, 2), round(height, 2))
        for index, ((label, count), height) in enumerate(zip(counts, heights, strict=True))
    )


def _number(value: float, unit: str) -> str:
    return f"{value:.3g}{unit}"
