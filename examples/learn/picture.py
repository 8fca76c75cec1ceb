"""The curves of a file of results as an SVG, and as the table of docs/learning.md: `python picture.py RESULTS.jsonl CURVES.svg`.

It needs the standard library only. Of several runs of one seed and mask, the last one counts.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

TITLES = {
    "right": "mask of the server",
    "late": "one token late",
    "early": "one token early",
    "ones": "all ones",
}
COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#4b5563")
WIDTH, HEIGHT, LEFT, TOP, GAP = 215, 200, 45, 40, 20
SPAN = 5  # steps


def load(path: Path) -> dict[str, dict[int, list[float]]]:
    """Return the rewards of each step, by mask and seed."""
    runs: dict[str, dict[int, list[float]]] = {mask: {} for mask in TITLES}
    for line in path.read_text().splitlines():
        run = json.loads(line)
        runs[run["mask"]][run["seed"]] = run["reward"]
    return {mask: dict(sorted(found.items())) for mask, found in runs.items() if found}


def smoothed(rewards: Sequence[float]) -> list[float]:
    """Return the mean of each step and the `SPAN` - 1 steps before it."""
    windows = [rewards[max(0, at - SPAN + 1) : at + 1] for at in range(len(rewards))]
    return [sum(window) / len(window) for window in windows]


def panel(left: int, title: str, runs: dict[int, list[float]]) -> list[str]:
    """Return the elements of one panel."""
    bottom = TOP + HEIGHT
    parts = [f'<text x="{left}" y="{TOP - 12}" font-weight="bold">{title}</text>']
    for tenth in range(0, 11, 2):
        y = bottom - HEIGHT * tenth / 10
        parts.append(f'<path d="M{left} {y:g}h{WIDTH}" stroke="#e5e7eb"/>')
        if left == LEFT:
            parts.append(f'<text x="{left - 8}" y="{y + 4:g}" text-anchor="end">{tenth / 10:.1f}</text>')
    longest = max(map(len, runs.values()))
    for step in range(0, longest + 1, 20):
        x = left + WIDTH * step / longest
        parts.append(f'<text x="{x:g}" y="{bottom + 18}" text-anchor="middle">{step}</text>')
    for seed, rewards in runs.items():
        points = [(left + WIDTH * (at + 0.5) / longest, bottom - HEIGHT * y) for at, y in enumerate(smoothed(rewards))]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = COLOURS[seed % len(COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    return parts


def svg(runs: dict[str, dict[int, list[float]]]) -> str:
    """Return the picture: one panel per mask, one line per seed."""
    width, height = LEFT + len(runs) * (WIDTH + GAP), TOP + HEIGHT + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#374151">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    for number, (mask, found) in enumerate(runs.items()):
        parts += panel(LEFT + number * (WIDTH + GAP), TITLES[mask], found)
    parts.append(f'<text x="{LEFT}" y="{height - 14}">mean reward, by step; mean of {SPAN} steps; seeds:</text>')
    for number, seed in enumerate(sorted({seed for found in runs.values() for seed in found})):
        x = LEFT + 290 + 40 * number
        parts.append(f'<text x="{x}" y="{height - 14}" fill="{COLOURS[seed % len(COLOURS)]}">{seed}</text>')
    return "\n".join([*parts, "</svg>\n"])


def table(runs: dict[str, dict[int, list[float]]]) -> str:
    """Return the Markdown table: the mean reward of the last ten steps."""
    seeds = sorted({seed for found in runs.values() for seed in found})
    rows = [["mask", *(f"seed {seed}" for seed in seeds), "above 0.8"], ["---"] * (len(seeds) + 2)]
    for mask, found in runs.items():
        ends = {seed: sum(rewards[-10:]) / len(rewards[-10:]) for seed, rewards in found.items()}
        reached = sum(end > 0.8 for end in ends.values())
        cells = [f"{found[seed][0]:.2f} to {ends[seed]:.2f}" if seed in ends else "" for seed in seeds]
        rows.append([TITLES[mask], *cells, f"{reached} of {len(ends)}"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    curves, drawn = load(Path(sys.argv[1])), Path(sys.argv[2])
    drawn.parent.mkdir(parents=True, exist_ok=True)
    drawn.write_text(svg(curves))
    print(table(curves))
