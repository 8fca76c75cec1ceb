"""The tables of a result, as cells: the terminal and Markdown show the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from bench.judge.result import GATEWAY_TARGET, GROWTH_TARGET, START_TARGET, Check, Cost, Result, Row
from bench.judge.workload import IN_MEMORY, ON_DISK, Api

_QUIET = 0.15
"""Up to this share of other load, a program counts as alone on its core. The kernel's network processing is part of it."""
_MEGABYTE = 1024 * 1024
_GROWTH = (("2x1k/32", "10x1k/32"), ("2x32k/16", "10x32k/16"))
"""Workloads of two and of ten turns with short and with long prompts."""
_IN_SUMMARY = (Api.SYNC, Api.INIT, Api.TOKENS)

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Headings and rows. The first two columns are texts."""


def cpu_table(result: Result) -> Table:
    """Return the CPU of every row, its floor and its target."""
    headings = ("workload", "API", "ms/turn", "range", "ms/rollout", "floor ms/turn", "ratio", "target", "met")
    rows = [
        (
            row.title,
            _api(row),
            f"{row.server.cpu_ms:.2f}",
            f"{row.server.cpu_ms_low:.2f}-{row.server.cpu_ms_high:.2f}",
            f"{row.server.rollout_ms:.1f}",
            f"{row.floor.cpu_ms:.2f}",
            f"{row.ratio:.1f}",
            "" if row.target is None else str(row.target),
            _met(row.met),
        )
        for row in result.rows
    ]
    return headings, rows


def summary_table(result: Result) -> Table:
    """Return the CPU of the usual APIs with a journal on the disk: milliseconds of a turn, and how many times the floor that is."""
    usual: dict[str, dict[Api, Row]] = {}
    for row in result.rows:
        if row.journal == ON_DISK and row.api in _IN_SUMMARY:
            usual.setdefault(row.title, {})[row.api] = row
    headings = ("workload", *(f"{api}, ms (x floor)" for api in _IN_SUMMARY))
    return headings, [(title, *(_costs(rows.get(api)) for api in _IN_SUMMARY)) for title, rows in usual.items()]


def _costs(row: Row | None) -> str:
    return "" if row is None else f"{row.server.cpu_ms:.2f} ({row.ratio:.1f})"


def traffic_table(result: Result) -> Table:
    """Return speed, latency, traffic and memory of every row, each with the floor's after a slash."""
    headings = (
        "workload",
        "API",
        "turns/s",
        "gap p50 ms",
        "gap p99 ms",
        "loop lag p99 ms",
        "bytes/turn",
        "KB/waiting rollout",
    )
    rows = [
        (
            row.title,
            _api(row),
            f"{_rate(row.server)} / {_rate(row.floor)}",
            _beside(row.server.gap_p50 or None, row.floor.gap_p50 or None, ".0f"),
            _beside(row.server.gap_p99 or None, row.floor.gap_p99 or None, ".0f"),
            _beside(row.server.lag_p99, row.floor.lag_p99, "g"),
            _beside(row.server.sent, row.floor.sent, ",.0f"),
            _beside(_kilobytes(row.server), _kilobytes(row.floor), ",.0f"),
        )
        for row in result.rows
    ]
    return headings, rows


def checks(result: Result) -> Iterator[Check]:
    """Yield the figures of the whole server that have targets."""
    if result.starts:
        yield Check("start until healthy", median(start.seconds for start in result.starts), START_TARGET, "s")
    by_place = {(row.workload, row.api): row for row in result.rows if row.journal == ON_DISK}
    over_http, over_grpc = by_place.get(("1x500/32", Api.SYNC)), by_place.get(("1x500/32", Api.GRPC_HTTP))
    if over_http and over_grpc:
        added = over_http.server.rollout_ms - over_grpc.server.rollout_ms
        yield Check("HTTP adds to the CPU of a rollout", added, GATEWAY_TARGET, "ms")
    for api in (Api.TOKENS, Api.SYNC):
        rows = [[by_place.get((name, api)) for name in names] for names in _GROWTH]
        short, long = ([row for row in pair if row is not None] for pair in rows)
        if len(short) == len(long) == 2:
            grown = _later_ms([row.server for row in long]) / _later_ms([row.server for row in short])
            floor = _later_ms([row.floor for row in long]) / _later_ms([row.floor for row in short])
            most = GROWTH_TARGET if api is Api.TOKENS else floor
            yield Check(f"CPU of a later turn over {api} at 32k, compared with 1k", grown, most, "x")


def _later_ms(costs: Sequence[Cost]) -> float:
    """Return what the turns after the first two cost, given rollouts of two and of ten turns."""
    few, many = costs
    return many.rollout_ms - few.rollout_ms


def notes(result: Result) -> Iterator[str]:
    """Yield what a reader of the tables must know: checks, circumstances, faults and the machine."""
    for check in checks(result):
        yield f"{check.name}: {check.value:.2f} {check.unit}, target {check.most:.2f} {check.unit}: {_met(check.met)}"
    for row in result.rows:
        beside = result.row(row.workload, row.api, ON_DISK)
        if beside is not None and row.journal == IN_MEMORY:
            added = beside.server.cpu_ms - row.server.cpu_ms
            yield f"journal on the disk, {row.title}, {row.api}: {added:+.2f} ms of CPU per turn"
    if result.starts:
        idle = median(start.resident for start in result.starts) / _MEGABYTE
        yield f"memory of the server: {idle:.0f} MB idle, {result.resident / _MEGABYTE:.0f} MB at the end"
    prompts = dict.fromkeys(_range(row.prompt_tokens) for row in result.rows)
    yield f"prompts of {', '.join(prompts)} tokens; tokenizer {result.tokenizer!r}"
    yield from _circumstances(result)
    counts = result.counts
    yield f"masks and digests: {counts.masks_accepted:,} accepted, {counts.masks_refused} refused"
    yield from counts.faults
    packages = ", ".join(f"{name} {number}" for name, number in result.machine["packages"].items())
    yield "{cpu}, {cores} cores, {system}, {python}; ".format_map(result.machine) + packages


def _circumstances(result: Result) -> Iterator[str]:
    if result.apart:
        yield "server and floor ran on one core, trainer and driver on another"
    else:
        yield "all programs shared ONE core, so turns/s are too low and CPU is too high"
    yield "the captured endpoint: one turn is one call of an agent that runs elsewhere; its floor is a proxy that reads nothing"
    yield "gap: from the trainer's response to the server's next request of the same rollout; each figure is server / floor"
    costs = [cost for row in result.rows for cost in (row.server, row.floor)]
    if any(cost.held_up for cost in costs):
        yield "a rate with * was limited by trainer and driver, which were busy nearly all the time"
    others = max((cost.others_share for cost in costs), default=0.0)
    if others > _QUIET:
        yield f"BUSY MACHINE: other processes used up to {others:.0%} of that core; turns/s are too low and CPU is too high"


def markdown(table: Table) -> str:
    """Return a table as Markdown."""
    headings, rows = table
    rules = ["---" if index < 2 else "---:" for index in range(len(headings))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rules, *rows))


def blocks(result: Result) -> Mapping[str, str]:
    """Return the parts of a result as Markdown, by the name of their markers."""
    return {
        "summary": markdown(summary_table(result)),
        "cpu": markdown(cpu_table(result)),
        "traffic": markdown(traffic_table(result)),
        "notes": "\n".join(f"* {line}" for line in notes(result)),
    }


def filled(text: str, parts: Mapping[str, str]) -> str:
    """Return a Markdown text with the parts between markers such as `<!-- bench cpu -->` and `<!-- end -->` replaced."""
    for name, block in parts.items():
        before, marker, rest = text.partition(f"<!-- bench {name} -->\n")
        if marker:
            text = f"{before}{marker}{block}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


def _api(row: Row) -> str:
    return row.api if row.journal == ON_DISK else f"{row.api}, {row.journal}"


def _rate(cost: Cost) -> str:
    return f"{cost.turns_per_second:,.0f}{'*' if cost.held_up else ''}"


def _beside(server: float | None, floor: float | None, form: str) -> str:
    found = ["-" if value is None else format(value, form) for value in (server, floor)]
    return "" if found == ["-", "-"] else " / ".join(found)


def _kilobytes(cost: Cost) -> float | None:
    return None if cost.waiting is None else cost.waiting / 1024


def _met(met: bool | None) -> str:
    return "" if met is None else "yes" if met else "NO"


def _range(lengths: Sequence[int]) -> str:
    return f"{lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else str(lengths[0])
