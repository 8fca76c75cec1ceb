"""What `rollout eval` prints: a progress line, and a summary at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rollout_server.cli.demo_output import plural

if TYPE_CHECKING:
    from rich.console import Console

    from rollout_server.evaluation.estimators import Estimate
    from rollout_server.evaluation.progress import RunningFigures
    from rollout_server.evaluation.summary import Figures, Summary

_LINES, _QUIET_SECONDS = 10, 30.0
"""Without a terminal, a progress line at each tenth, and after this time."""


@contextmanager
def show_progress(console: Console, figures: RunningFigures) -> Iterator[Callable[[], None]]:
    """Show an evaluation's figures within the block; yield the function to call after each result.

    On a terminal it is one line that changes, else lines that are printed now and then.
    """
    if not console.is_terminal:
        yield _line_printer(console, figures)
        return
    from rich.progress import BarColumn, Progress, TextColumn

    with Progress(BarColumn(), TextColumn("{task.description}"), console=console, transient=True) as bar:
        task = bar.add_task(figures.line(), total=figures.total, completed=figures.done)
        yield lambda: bar.update(task, completed=figures.done, description=figures.line())


def _line_printer(console: Console, figures: RunningFigures) -> Callable[[], None]:
    tenths, printed = figures.done * _LINES // max(figures.total, 1), time.monotonic()

    def show() -> None:
        nonlocal tenths, printed
        reached, now = figures.done * _LINES // figures.total, time.monotonic()
        if reached > tenths or now - printed >= _QUIET_SECONDS:
            tenths, printed = reached, now
            console.print(figures.line(), markup=False, soft_wrap=True)

    return show


def show_summary(console: Console, summary: Summary, unmet: Sequence[str], files: Mapping[str, str]) -> None:
    """Print the summary, the reasons `unmet` for exit code 1, and the files that were written."""
    from rich.table import Table
    from rich.text import Text

    from rollout_server.inspection.escape import visible

    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _figures(summary):
        table.add_row(Text(visible(name), "dim"), Text(visible(value)))
    console.print(table)
    for column, parts in summary.by.items():
        for line in _by_lines(column, parts):
            console.print(Text(line), soft_wrap=True)
    for text in unmet:
        console.print(Text(text, "red"), soft_wrap=True)
    for kind, text in summary.examples.items():
        console.print(Text(visible(f"  {kind}: {text}"), "red"), soft_wrap=True)
    named = f"; samples are in {files['samples']}" if "samples" in files else ""
    text = f"next: open {files['report']}; each rollout is a line of {files['results']}{named}"
    console.print(Text(visible(text)), soft_wrap=True)


def _figures(summary: Summary) -> list[tuple[str, str]]:
    times = ", ".join(f"{name} {value:.3g}" for name, value in summary.seconds.items())
    errors = ", ".join(f"{name} {count}" for name, count in summary.tool_errors.items())
    found = [
        ("rollouts", f"{summary.finished}/{summary.rollouts} completed, {plural(summary.rows, 'row')}"),
        ("pass rate", f"{_rate(summary)} (reward >= {summary.threshold:g})"),
        *(
            (name, ", ".join(f"{value:.1%} (k={k}{_rows(summary, k)})" for k, value in values.items()))
            for name, values in (("pass@k", summary.pass_at), ("pass^k", summary.pass_hat))
            if values
        ),
        ("mean reward", _mean(summary.reward, "no rewards")),
        *((f"score {name}", _mean(score, "")) for name, score in summary.scores.items()),
        ("tokens", f"{summary.tokens['generated']:.0f} generated, {summary.tokens['generated_mean']:.1f} per rollout"),
        ("time", f"{times} s" if times else "-"),
        ("tool calls", f"{summary.tool_calls}" + (f", errors: {errors}" if errors else ", no errors")),
    ]
    if summary.failures:
        found.append(("failures", _counts(summary.failures)))
    if summary.failure_classes:
        found.append(("failure classes", _counts(summary.failure_classes)))
    return found


def _rows(summary: Summary, k: str) -> str:
    """Return the number of rows that an estimate is about, if some have too few rollouts for it."""
    rows = summary.pass_rows[k]
    return f", {plural(rows, 'row')}" if rows < summary.rows else ""


def _by_lines(column: str, parts: Mapping[str, Figures]) -> Iterator[str]:
    """Return the lines of a table. On a narrow terminal they wrap: a table of `rich` would cut the numbers."""
    from rollout_server.inspection.escape import visible

    names = list(dict.fromkeys(name for figures in parts.values() for name in figures.scores))
    table = [[column, "rollouts", "failed", "pass rate", "mean reward", *names]]
    for label, figures in parts.items():
        failed = figures.rollouts - figures.finished
        scores = (_mean(figures.scores.get(name), "-") for name in names)
        table.append([label, str(figures.rollouts), str(failed), _rate(figures), _mean(figures.reward, "-"), *scores])
    shown = [list(map(visible, line)) for line in table]
    widths = [max(map(len, cells)) for cells in zip(*shown, strict=True)]
    for line in shown:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _rate(figures: Figures) -> str:
    if figures.pass_rate is None:
        return "no rewards"
    error = "" if figures.pass_rate_error is None else f" ± {figures.pass_rate_error:.1%}"
    return f"{figures.pass_rate:.1%}{error}"


def _mean(estimate: Estimate | None, missing: str) -> str:
    if estimate is None:
        return missing
    return f"{estimate.mean:.4g}" + ("" if estimate.error is None else f" ± {estimate.error:.2g}")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
