"""A verdict on a terminal. Text of templates and models is foreign: it is shown escaped, on one line."""

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


def show(console: Console, verdict: TemplateReport) -> None:
    """Prints all of it, what matters most first and last."""
    _say(console, f"{verdict.tokenizer}, template: {verdict.template}", "bold")
    _judge(console, verdict)
    console.print(_facts(verdict))
    if verdict.tallies:
        _say(console, "\nA trainer that renders everything anew and counts how much longer it got", "bold")
        console.print(_trainers(verdict.tallies))
        _worst(console, verdict)
    _say(
        console,
        f"\nBy kind of conversation, arguments as {_FORMS[verdict.form]} (wrong: masks; otherwise: written in another way)",
        "bold",
    )
    console.print(_kinds(verdict.rows))
    _refusals(console, verdict.rows)
    _listed(console, "Good to know", verdict.cautions)
    _listed(console, "What to do", verdict.advice)


def _judge(console: Console, verdict: TemplateReport) -> None:
    if verdict.refusal:
        _say(console, "Cannot be used: " + _one_line(verdict.refusal, 600), "bold red")
    elif not verdict.usable:
        _say(console, "Cannot be used: in none of the conversations was there a boundary to look at", "bold red")
    elif not verdict.stable:
        _say(console, "Not stable", "bold red")
    elif verdict.conditions:
        _say(console, "Stable, if", "bold green")
    else:
        _say(console, "Stable: what was rendered once is rendered the same when the conversation goes on", "bold green")
    for finding in verdict.faults:
        _fault(console, finding)
    if verdict.conditions and not verdict.stable:
        _say(console, "It would also be needed that", "")
    for condition in verdict.conditions:
        _say(console, f"  - {condition}", "")


def _fault(console: Console, finding: Finding) -> None:
    _say(console, f"  ✗ {finding.text}" + (f": {_times(finding.boundaries)}" if finding.boundaries else ""), "red")
    if finding.example is not None:
        _example(console, finding.example)


def _example(console: Console, example: Example) -> None:
    at = f", token {example.index}" if example.index else ""
    _say(console, f"      in {example.kind!r}{at}", "dim")
    _say(console, f"      was there  {_quoted(example.truth)}", "")
    _say(console, f"      rendered   {_quoted(example.rendered)}", "")


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _facts(verdict: TemplateReport) -> Table:
    stops, traits = verdict.stops, verdict.traits
    texts = [f"{stop.text} ({stop.id})" if stop else "none" for stop in (stops.final, stops.calls, stops.eos)]
    kept = "each stays in front of its answer"
    if (example := verdict.generation_prompt) is not None:
        kept = f"not kept in {example.kind!r}: {_quoted(example.truth)}, rendered {_quoted(example.rendered)}"
    tools = "in the prompt" if traits.tools_shown else "not in the prompt"
    rows = {
        "an answer ends with": f"{texts[0]}; with calls {texts[1]}; eos_token {texts[2]}",
        "arguments as text": traits.arguments[Arguments.RECEIVED].value,
        "arguments as objects": traits.arguments[Arguments.PARSED].value,
        "tools": tools + ("; [] is not rendered as none" if traits.empty_tools_differ else ""),
        "generation prompt": kept,
        "of the time it prints": traits.dated.value,
        "short form against full": _short_form(verdict.short_form),
        "reads the variables": ", ".join(traits.switches) or "none of its own",
    }
    if verdict.switches_tried:
        rows["tried, parted"] = ", ".join(f"{name}: {number}" for name, number in verdict.switches_tried.items())
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
    return f"different at {different} of {short.compared} boundaries: such rollouts render the whole conversation in every turn"


def _trainers(tallies: Iterable[FormCounts]) -> Table:
    table = _table("arguments", "answers written", *_MASKS.values())
    for tally in tallies:
        counts = [_text(str(number), _colour(mask, number)) for mask, number in tally.masks.items()]
        table.add_row(_FORMS[tally.form], tally.writing.value, *counts)
    return table


def _worst(console: Console, verdict: TemplateReport) -> None:
    worst = [tally for tally in verdict.tallies if tally.worst is not None and tally.form is verdict.form]
    for tally in worst:
        if (each := tally.worst) is not None:
            why = f", {each.cause.value}" if each.cause else ""
            counted = f"{each.counted} counted, {each.added} are there"
            _say(
                console, f"worst, {tally.writing.value}: {counted} ({each.kind}, after message {each.answer}{why})", ""
            )


def _kinds(rows: Iterable[ReportRow]) -> Table:
    table = _table("conversation", "turns", "kept", "wrong", "otherwise", "what happens")
    for row in rows:
        wrong = row.boundaries - row.masks[Mask.RIGHT]
        otherwise = f"{row.wrong_otherwise[0]} of {row.wrong_otherwise[1]}" if row.wrong_otherwise[1] else "-"
        happens = [f"{cause.value} {number}" for cause, number in row.causes.items()]
        happens += [f"{word} left out" for word in row.left_out]
        happens += ["no place to cut"] if row.uncut else []
        happens += ["refused"] if row.refused else []
        style = "green" if row.kept == row.boundaries and not happens else "yellow" if not row.causes else "red"
        kind, missed = _text(_one_line(row.kind)), _text(str(wrong), "red" if wrong else "")
        told = _text(", ".join(happens) or "kept", style)
        table.add_row(kind, str(row.boundaries), str(row.kept), missed, otherwise, told)
    return table


def _refusals(console: Console, rows: Iterable[ReportRow]) -> None:
    by_words: dict[str, list[str]] = {}
    for row in rows:
        for words in row.refused:
            by_words.setdefault(words, []).append(row.kind)
    for words, kinds in by_words.items():
        _say(console, f"refused: {_one_line(', '.join(kinds))}: {_quoted(words)}", "yellow")


def _listed(console: Console, title: str, texts: Iterable[str]) -> None:
    lines = list(texts)
    if lines:
        _say(console, f"\n{title}", "bold")
    for line in lines:
        _say(console, f"  - {_one_line(line, 400)}", "")


def _say(console: Console, text: str, style: str) -> None:
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


def _quoted(text: str) -> str:
    return f'"{_one_line(text)}"'


def _one_line(text: str, longest: int = _LONGEST) -> str:
    shown = visible(text)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"
