"""Print a report on a terminal. Text of files is untrusted: it is escaped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout_server.inspection.escape import visible
from rollout_server.verification.findings import FindingKind, SampleFinding, Severity
from rollout_server.verification.shapes import SampleShape
from rollout_server.verification.verify import VerifiedFiles

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {Severity.FATAL: "red", Severity.WARN: "yellow"}
_LONGEST = 400


def print_report(console: Console, report: VerifiedFiles) -> None:
    """Print a table of the kinds of findings, the first findings, the totals and the verdict."""
    log, first = report.log, report.log.first()
    number = log.counts.total()
    if number:
        _print_kinds(console, report)
    for finding in first:
        _print(console, _described(finding), _STYLES[finding.kind.severity])
    if number > len(first):
        _print(console, f"... and {number - len(first)} more; --limit {number} prints all", "dim")
    shapes = ", ".join(f"{report.rows[shape]} {shape.value}" for shape in SampleShape if report.rows[shape])
    trained = f"{report.trained_tokens} of {report.response_tokens} response tokens train"
    _print(console, f"rows: {shapes or 'none'}; {trained}", "")
    if report.completions:
        text = f"{report.retokenized} of {report.completions} completions encode to other tokens than were sampled"
        _print(console, f"{text}, which is normal", "dim")
    fatal, warnings = log.number(Severity.FATAL), log.number(Severity.WARN)
    if fatal:
        _print(console, f"FATAL: {fatal} findings, {warnings} warnings; do not train on these samples", "bold red")
    else:
        _print(console, f"OK: no fatal findings, {warnings} warnings", "bold green")


def _print_kinds(console: Console, report: VerifiedFiles) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    counts = report.log.counts
    for kind in FindingKind:
        if counts[kind]:
            severity = Text(kind.severity.value, _STYLES[kind.severity])
            table.add_row(severity, Text(str(counts[kind])), Text(kind.code), Text(kind.meaning))
    console.print(table)


def _described(finding: SampleFinding) -> str:
    location, name = finding.location, finding.field_path
    index = "" if finding.index is None else f"[{finding.index}]"
    parts = [
        "" if location is None else f"{location.file}, line {location.number}",
        f"{name}{index}",
        finding.text[:_LONGEST],
    ]
    return f"{finding.kind.severity.value} {': '.join(part for part in parts if part)}"


def _print(console: Console, text: str, style: str) -> None:
    from rich.text import Text

    console.print(Text(visible(text), style), soft_wrap=True)
