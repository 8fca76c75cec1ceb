"""Output of a result: tables on the terminal, JSON, Markdown and a chart."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bench.judge import tables
from bench.judge.chart import svg
from bench.judge.result import Result


def show(result: Result, console: Console) -> None:
    """Print the tables and their notes."""
    for title, (headings, rows) in {
        "CPU of the server, beside a loop without tokens": tables.cpu_table(result),
        "Speed, latency, traffic and memory: server / floor": tables.traffic_table(result),
    }.items():
        table = Table(title=title, title_justify="left")
        for index, heading in enumerate(headings):
            table.add_column(heading, justify="left" if index < 2 else "right", no_wrap=True)
        for cells in rows:
            table.add_row(*cells)
        console.print(table)
    for line in tables.notes(result):
        console.print(line, highlight=False, markup=False)


def write(result: Result, json_file: Path | None, markdown_files: list[Path], chart: Path | None) -> None:
    """Write a result. A Markdown file that exists is filled at its markers; another one is written anew."""
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    for file in markdown_files:
        if file.exists():
            file.write_text(tables.filled(file.read_text(), tables.blocks(result)))
        else:
            file.write_text("\n\n".join(tables.blocks(result).values()) + "\n")
    if chart is not None:
        chart.parent.mkdir(parents=True, exist_ok=True)
        chart.write_text(svg(result))


def read(json_file: Path) -> Result:
    """Read a result from JSON."""
    return msgspec.json.decode(json_file.read_bytes(), type=Result)
