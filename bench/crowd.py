"""`python -m bench.crowd`: thousands of rollouts at once in one process, and single rollouts of extreme size.

The trainer takes seconds for each completion, and starts the rollouts itself. By an ideal schedule the server requests the first
completion when it is asked to start a rollout, and the next one when the trainer has responded. The lateness of a request is the
time from then until it arrives.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from bench.judge.lag import Lag
from bench.judge.site import Bench, Running, post, send
from bench.judge.tables import filled, markdown
from bench.judge.workload import IN_MEMORY, ON_DISK, Plan, Target, Workload
from bench.programs.agents import LONG_RESULT
from bench.programs.child import ChildFailed, Cores, on_cores
from bench.programs.clients import Batch, Ends
from bench.programs.loop import new_loop
from bench.programs.tally import Traffic

_WARM_UP = 8
_POLL_SECONDS = 0.5
_FILES_OF_A_ROLLOUT = {"sync": 2, "init": 1}
"""Connections that one rollout keeps in the server: to its trainer, and from a caller that waits for the rollout. The trainer has
the other ends. gRPC shares one connection."""
_FILES = 1_000
_MAX_SECONDS = 1800.0
_GRPC = ("tokens", "stream")


@dataclass(frozen=True, slots=True)
class Case:
    """Rollouts to run at once.

    Args:
        apis: APIs of `Batch`.
        rollouts: their number.
        conversation: TURNSxCONTEXT.
        seconds: how long the trainer takes for a completion.
        spread: seconds over which the rollouts are started.
        agent: name of the agent.
    """

    apis: tuple[str, ...]
    rollouts: int
    conversation: str
    seconds: float = 0.0
    spread: float = 0.0
    agent: str = ""

    @property
    def ideal(self) -> float:
        """Seconds that the rollouts take if nothing but the trainer takes time."""
        return self.spread + int(self.conversation.partition("x")[0]) * self.seconds

    def __str__(self) -> str:
        turns, _, context = self.conversation.partition("x")
        text = f"{self.rollouts:,} of {turns} turns, {context} tokens"
        if self.seconds:
            text += f", {self.seconds:g} s each, started {f'over {self.spread:g} s' if self.spread else 'at once'}"
        return text


CROWDS = (
    Case(("sync", "init", "tokens", "stream"), 2_000, "3x1000", 1.0),
    Case(("init", "tokens", "stream"), 2_000, "3x1000", 10.0, 10.0),
    Case(("init", "tokens"), 10_000, "3x1000", 10.0, 10.0),
    Case(("tokens",), 10_000, "3x1000", 1.0),
)
SINGLES = (
    Case(("sync", "tokens"), 1, "4x100000"),
    Case(("sync", "tokens"), 1, f"4x1000+{LONG_RESULT}", agent="verbose"),
    Case(("init", "tokens"), 8, "200x4000"),
)
QUICK = (Case(("tokens",), 50, "3x400", 0.2, 0.2), Case(("tokens",), 1, "4x4000"))


class Found(msgspec.Struct, frozen=True):
    """Results of one case over one API.

    Args:
        seconds: until the last rollout ended.
        late_p50, late_p99: lateness of the server's requests in milliseconds.
        lag: the longest delay of the server's event loop in milliseconds, an upper bound; None: not measured.
        turn_ms: CPU of a turn in milliseconds.
        kilobytes: growth of the server's resident memory up to its peak, per rollout.
        failed: rollouts that did not end as scripted; `first`: how the first of them ended.
    """

    case: str
    api: str
    ideal: float
    seconds: float
    late_p50: float
    late_p99: float
    lag: float | None
    turn_ms: float
    kilobytes: float
    failed: int
    first: str


async def run(cases: Sequence[Case], tokenizer: Path, journal: str, console: Console) -> Sequence[Found]:
    """Run cases, each in a new server. Raises `ChildFailed`."""
    cores = Cores.here()
    found: list[Found] = []
    with on_cores(cores.beside):
        for case in cases:
            turns, _, context = case.conversation.partition("x")
            size, _, result_bytes = context.partition("+")
            workload = Workload(int(turns), int(size), case.rollouts, case.rollouts, Target(1.0, "x"))
            workload = replace(workload, result_bytes=int(result_bytes or 0))
            settings = {"ROLLOUT_TOOL_OUTPUT_BYTES": str(2 * LONG_RESULT)} if result_bytes else {}
            bench = Bench(Plan((workload,), 0), tokenizer, cores, settings=settings)
            for api in case.apis:
                console.print(f"{case}: {api}")
                async with bench.server(journal) as server, bench.trainer(server.url) as trainer:
                    found.append(await _measure(case, api, server, trainer))
                *_, row = _table(found)
                console.print(*row[1:], sep="  ", highlight=False)
    return found


async def _measure(case: Case, api: str, server: Running, trainer: Running) -> Found:
    address = f"127.0.0.1:{server.grpc_port}" if api in _GRPC else server.url
    warm_up = Batch(api, address, case.conversation, 1, 1, agent=case.agent)
    timeout = aiohttp.ClientTimeout(total=_MAX_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        await post(http, f"{trainer.url}/rollouts", warm_up, Ends)
        await send(http, f"{trainer.url}/pace", case.seconds)
        await send(http, f"{trainer.url}/traffic")
        batch = msgspec.structs.replace(
            warm_up, rollouts=case.rollouts, concurrency=case.rollouts, spread=case.spread, timed=True
        )
        before, cpu, began = server.child.resident_bytes(), server.child.cpu_seconds(), time.monotonic()
        running = asyncio.ensure_future(post(http, f"{trainer.url}/rollouts", batch, Ends))
        peak, lag = before, Lag(http, server.url)
        async with lag:
            while not running.done():
                peak = max(peak, server.child.resident_bytes())
                await asyncio.wait([running], timeout=_POLL_SECONDS)
        ends: Ends = await running
        seconds, used = time.monotonic() - began, server.child.cpu_seconds() - cpu
        traffic = await post(http, f"{trainer.url}/traffic", {}, Traffic)
    return Found(
        case=str(case),
        api=api,
        ideal=case.ideal,
        seconds=seconds,
        late_p50=traffic.gap_p50,
        late_p99=traffic.gap_p99,
        lag=lag.percentile_ms(1.0),
        turn_ms=1000 * used / max(traffic.requests, 1),
        kilobytes=(peak - before) / 1024 / case.rollouts,
        failed=ends.failed,
        first=ends.first,
    )


def raise_file_limit(cases: Sequence[Case]) -> None:
    """Raise this process's limit of open files, which children inherit. Raises ValueError if it stays too low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    connections = (_FILES_OF_A_ROLLOUT.get(api, 0) * case.rollouts for case in cases for api in case.apis)
    needed = max(connections, default=0) + _FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"these rollouts need up to {needed:,} open files, but the hard limit is {hard:,}: raise it (`ulimit -Hn`, "
            "LimitNOFILE= of systemd), or run fewer with --most"
        )


def _table(found: Sequence[Found]) -> Iterator[Sequence[str]]:
    yield (
        "rollouts",
        "API",
        "ideal s",
        "took s",
        "late p50 ms",
        "late p99 ms",
        "loop lag ms",
        "CPU ms/turn",
        "KB/rollout",
        "failed",
    )
    for each in found:
        late = (f"{each.late_p50:,.0f}", f"{each.late_p99:,.0f}", "" if each.lag is None else f"{each.lag:,.0f}")
        cost = (f"{each.turn_ms:.1f}", f"{each.kilobytes:,.0f}", str(each.failed))
        yield each.case, each.api, f"{each.ideal:g}", f"{each.seconds:.1f}", *late, *cost


def main() -> int:
    """Print the table of crowds and of single rollouts. Exits with 1 if a rollout failed."""
    parser = ArgumentParser("python -m bench.crowd", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--tokenizer", type=Path, default=TOY_TOKENIZER, help="directory of a tokenizer")
    parser.add_argument("--journal", choices=(ON_DISK, IN_MEMORY), default=ON_DISK)
    parser.add_argument("--most", type=int, default=10_000, help="skip cases of more rollouts")
    parser.add_argument("--least", type=int, default=0, help="skip cases of fewer rollouts")
    parser.add_argument("--api", help="run only this API")
    parser.add_argument("--quick", action="store_true", help="run small cases, as a check of the benchmark")
    parser.add_argument(
        "--markdown", type=Path, action="append", default=[], help="write the table between the markers"
    )
    options, console = parser.parse_args(), Console(stderr=True)
    cases: Sequence[Case] = QUICK if options.quick else (*CROWDS, *SINGLES)
    cases = [
        replace(case, apis=tuple(api for api in case.apis if options.api in (None, api)))
        for case in cases
        if options.least <= case.rollouts <= options.most
    ]
    try:
        raise_file_limit(cases)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            found = runner.run(run(cases, options.tokenizer.resolve(), options.journal, console))
    except (ChildFailed, ValueError) as error:
        console.print(f"bench.crowd: {error}", style="red", markup=False)
        return 1
    headings, *rows = _table(found)
    table = Table(*headings)
    for cells in rows:
        table.add_row(*cells)
    Console(width=170).print(table)
    for file in options.markdown:
        file.write_text(filled(file.read_text(), {"crowd": markdown((headings, rows))}))
    for each in found:
        if each.failed:
            console.print(f"{each.case}, {each.api}: {each.failed} failed, the first with {each.first}", markup=False)
    return int(any(each.failed for each in found))


if __name__ == "__main__":
    sys.exit(main())
