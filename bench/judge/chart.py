"""A result as an SVG: CPU of a turn as a multiple of the floor's, by workload. It needs the standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, log2

from bench.judge.result import Result, Row
from bench.judge.workload import ON_DISK, Api

_APIS = {Api.SYNC: "a", Api.INIT: "b", Api.TOKENS: "c"}
_LEFT, _TOP, _WIDTH, _RIGHT = 190, 44, 470, 70
_BAR, _GAP = 13, 16
_STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #374151 } .grid { stroke: #e5e7eb } .floor { stroke: #111827; stroke-width: 1.5 }
.back { fill: #ffffff } .a { fill: #2563eb } .b { fill: #d97706 } .c { fill: #059669 }
.target { stroke: #db2777; stroke-width: 2.5 }
@media (prefers-color-scheme: dark) {
text { fill: #d1d5db } .grid { stroke: #374151 } .floor { stroke: #f9fafb } .back { fill: #0d1117 }
.a { fill: #60a5fa } .b { fill: #fbbf24 } .c { fill: #34d399 } .target { stroke: #f472b6 }
}
</style>"""


def svg(result: Result) -> str:
    """Return the chart: a bar per workload and API on a logarithmic axis, the floor as a line at 1, and the targets."""
    rows = [row for row in result.rows if row.journal == ON_DISK and row.api in set(_APIS) and row.target is not None]
    groups = {row.title: [each for each in rows if each.title == row.title] for row in rows}
    doublings = max(1, ceil(log2(max((row.ratio for row in rows), default=2.0))))
    height = _TOP + sum(len(group) * _BAR + _GAP for group in groups.values()) + 46
    width = _LEFT + _WIDTH + _RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        _STYLE,
        f'<rect class="back" width="{width}" height="{height}" rx="8"/>',
        f'<text x="16" y="24">CPU of a turn, as a multiple of a bare loop in the same run ({result.tokenizer})</text>',
    ]
    bottom = height - 46
    for step in range(-1, doublings + 1):
        x = _x(2.0**step, doublings)
        kind = "floor" if step == 0 else "grid"
        parts.append(f'<path class="{kind}" d="M{x:.1f} {_TOP - 6}V{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{2.0**step:g}</text>')
    top = _TOP
    for title, group in groups.items():
        parts.append(f'<text x="{_LEFT - 10}" y="{top + len(group) * _BAR / 2 + 4:g}" text-anchor="end">{title}</text>')
        for row in group:
            parts += _bar(row, top, doublings)
            top += _BAR
        top += _GAP
    parts += _legend(height - 12)
    return "\n".join([*parts, "</svg>\n"])


def _x(ratio: float, doublings: int) -> float:
    return _LEFT + _WIDTH * (log2(max(ratio, 0.5)) + 1) / (doublings + 1)


def _bar(row: Row, top: int, doublings: int) -> Iterator[str]:
    end = _x(row.ratio, doublings)
    yield f'<rect class="{_APIS[Api(row.api)]}" x="{_LEFT}" y="{top}" width="{end - _LEFT:.1f}" height="{_BAR - 2}"/>'
    yield f'<text x="{end + 6:.1f}" y="{top + 10}" font-size="11">{row.server.cpu_ms:.2f} ms</text>'
    if row.target is not None:
        most = row.target.most if row.target.unit == "x" else row.target.most / row.floor.cpu_ms
        yield f'<path class="target" d="M{_x(most, doublings):.1f} {top - 1}v{_BAR}"/>'


def _legend(y: int) -> Iterator[str]:
    x = 16
    for api, kind in _APIS.items():
        yield f'<rect class="{kind}" x="{x}" y="{y - 10}" width="10" height="10"/><text x="{x + 15}" y="{y}">{api}</text>'
        x += 40 + 7 * len(api)
    yield f'<path class="floor" d="M{x + 4} {y - 11}v13"/><text x="{x + 14}" y="{y}">bare loop</text>'
    yield f'<path class="target" d="M{x + 94} {y - 11}v13"/><text x="{x + 104}" y="{y}">target</text>'
