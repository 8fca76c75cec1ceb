"""Print a report on a terminal. Text of templates and models is untrusted: it is escaped and printed on one line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rollout_server.edge.tokens.rendering_form import Arguments
from rollout_server.inspection.escape import visible
from rollout_server.tokencheck.boundary import Mask
from rollout_server.tokencheck.report import Example, Finding, FormCounts, ReportRow, ShortForm, TemplateReport

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_LONGEST = 100
_FORMS = {Arguments.RECEIVED: "text", Arguments.PARSED: "objects"}
_MASKS = {Mask.RIGHT: "right", Mask.TOKENS: "only length right", Mask.LENGTH: "wrong", Mask.NEGATIVE: "negative"}


def print_report(console: Console, report: TemplateReport) -> None:
    """Print the whole report. The most important parts come first and last."""
    _print(console, f"{report.tokenizer}, template: {report.template}", "bold")
    _print_findings(console, report)
    console.print(_facts(report))
    if report.tallies:
        _print(
            console,
            "\nMasks of a trainer that renders the whole conversation in each turn and counts its growth",
            "bold",
        )
        console.print(_trainers(report.tallies))
        _print_worst(console, report)
    _print(
        console,
        f"\nBy kind of conversation, arguments as {_FORMS[report.form]} (wrong: masks; otherwise: with other spelling or tokens)",
        "bold",
    )
    console.print(_kinds(report.rows))
    _print_refusals(console, report.rows)
    _print_list(console, "Good to know", report.cautions)
    _print_list(console, "What to do", report.advice)


def _print_findings(console: Console, report: TemplateReport) -> None:
    if report.refusal:
        _print(console, "Cannot be used: " + _one_line(report.refusal, 600), "bold red")
    elif not report.usable:
        _print(console, "Cannot be used: no conversation had a turn boundary to compare", "bold red")
    elif not report.stable:
        _print(console, "Not stable", "bold red")
    elif report.conditions:
        _print(console, "Stable, if", "bold green")
    else:
        _print(console, "Stable: the rendered history stays the same when the conversation continues", "bold green")
    for finding in report.faults:
        _print_fault(console, finding)
    if report.conditions and not report.stable:
        _print(console, "Further conditions", "")
    for condition in report.conditions:
        _print(console, f"  - {condition}", "")


def _print_fault(console: Console, finding: Finding) -> None:
    _print(console, f"  ✗ {finding.text}" + (f": {_times(finding.boundaries)}" if finding.boundaries else ""), "red")
    if finding.example is not None:
        _print_example(console, finding.example)


def _print_example(console: Console, example: Example) -> None:
    at = f", token {example.index}" if example.index else ""
    _print(console, f"      in {example.kind!r}{at}", "dim")
    _print(console, f"      expected  {_quote(example.truth)}", "")
    _print(console, f"      rendered  {_quote(example.rendered)}", "")


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _facts(report: TemplateReport) -> Table:
    stops, traits = report.stops, report.traits
    texts = [f"{stop.text} ({stop.id})" if stop else "none" for stop in (stops.final, stops.calls, stops.eos)]
    prompt_text = "kept in front of each completion"
    if (example := report.generation_prompt) is not None:
        prompt_text = f"not kept in {example.kind!r}: {_quote(example.truth)}, rendered {_quote(example.rendered)}"
    tools = "in the prompt" if traits.tools_shown else "not in the prompt"
    rows = {
        "completions end with": f"{texts[0]}; with calls {texts[1]}; eos_token {texts[2]}",
        "arguments as text": traits.arguments[Arguments.RECEIVED].value,
        "arguments as objects": traits.arguments[Arguments.PARSED].value,
        "tools": tools + ("; [] is rendered differently from none" if traits.empty_tools_differ else ""),
        "generation prompt": prompt_text,
        "prints the time": traits.dated.value,
        "short form vs. full": _short_form(report.short_form),
        "template variables": ", ".join(traits.switches) or "none",
    }
    if report.switches_tried:
        rows["divergences with"] = ", ".join(f"{name}: {number}" for name, number in report.switches_tried.items())
    table = _table(None, None)
    for name, text in rows.items():
        table.add_row(_text(name, "dim"), _text(_one_line(text, 400)))
    return table


def _short_form(short: ShortForm) -> str:
    if not short.compared:
        return "not comparable: every turn renders the whole conversation"
    if short.holds:
        return f"the same at all {short.compared} boundaries"
    different = short.compared - short.equal
    return (
        f"different at {different} of {short.compared} boundaries: rollouts render the whole conversation in every turn"
    )


def _trainers(counts: Iterable[FormCounts]) -> Table:
    table = _table("arguments", "completions written", *_MASKS.values())
    for count in counts:
        cells = [_text(str(number), _colour(mask, number)) for mask, number in count.masks.items()]
        table.add_row(_FORMS[count.form], count.writing.value, *cells)
    return table


def _print_worst(console: Console, report: TemplateReport) -> None:
    worst = [count for count in report.tallies if count.worst is not None and count.form is report.form]
    for count in worst:
        if (each := count.worst) is not None:
            why = f", {each.cause.value}" if each.cause else ""
            counted = f"{each.counted} counted, {each.added} correct"
            _print(
                console, f"worst, {count.writing.value}: {counted} ({each.kind}, after message {each.answer}{why})", ""
            )


def _kinds(rows: Iterable[ReportRow]) -> Table:
    table = _table("conversation", "turns", "kept", "wrong", "otherwise", "what happens")
    for row in rows:
        wrong = row.boundaries - row.masks[Mask.RIGHT]
        otherwise = f"{row.wrong_otherwise[0]} of {row.wrong_otherwise[1]}" if row.wrong_otherwise[1] else "-"
        happens = [f"{cause.value} {number}" for cause, number in row.causes.items()]
        happens += [f"{name} left out" for name in row.left_out]
        happens += ["no place to cut"] if row.uncut else []
        happens += ["refused"] if row.refused else []
        style = "green" if row.kept == row.boundaries and not happens else "yellow" if not row.causes else "red"
        kind, missed = _text(_one_line(row.kind)), _text(str(wrong), "red" if wrong else "")
        cell = _text(", ".join(happens) or "kept", style)
        table.add_row(kind, str(row.boundaries), str(row.kept), missed, otherwise, cell)
    return table


def _print_refusals(console: Console, rows: Iterable[ReportRow]) -> None:
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        for reason in row.refused:
            by_reason.setdefault(reason, []).append(row.kind)
    for reason, kinds in by_reason.items():
        _print(console, f"refused: {_one_line(', '.join(kinds))}: {_quote(reason)}", "yellow")


def _print_list(console: Console, title: str, texts: Iterable[str]) -> None:
    lines = list(texts)
    if lines:
        _print(console, f"\n{title}", "bold")
    for line in lines:
        _print(console, f"  - {_one_line(line, 400)}", "")


def _print(console: Console, text: str, style: str) -> None:
    console.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)


def _table(*columns: str | None) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=any(columns), pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column or "", overflow="fold", no_wrap=number == 0)
    return table


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style)


def _colour(mask: Mask, number: int) -> str:
    if not number:
        return "dim"
    return "green" if mask is Mask.RIGHT else "red"


def _quote(text: str) -> str:
    return f'"{_one_line(text)}"'


def _one_line(text: str, longest: int = _LONGEST) -> str:
    escaped = visible(text)
    return escaped if len(escaped) <= longest else escaped[: longest - 1] + "…"
