"""`python -m bench.dialects [DIRECTORY]`: the server's cost of a turn with each trainer protocol, as the history grows.

A conversation starts with a prompt of about 1k, 8k or 32k tokens (or `--size`) and continues for several turns. The strict
trainer runs in a separate process. The first turn is the warm-up: it opens the connection and sends the whole prompt. The
tables show, for the turns after it:

* CPU of this process and all its threads, from the completion request to its result: rendering, encoding, writing and reading.
  The value is the median over the turns of a rollout, and then the minimum over the rollouts: other load can only add to it.
* Bytes of the request bodies, including retries; without headers, TCP and responses.

The background CPU of this process (`bench.cpu`) is subtracted for the time of each turn: the strict trainer renders and
verifies the whole history in every turn, so a longer history also means a longer wait.

The rows "whole server" (`bench.whole`) also include the rollout around the sampler.

In token mode, CPU and bytes should not grow with the history; the second table shows the growth. In the other modes a response
contains the ids of its whole prompt, and reading them also takes CPU.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rollout_server.core.message import Message
from rollout_server.core.spec import Dialect
from rollout_server.edge.tokens.tokenizer import Frame, LoadedTokenizer
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from bench import samplers, whole
from bench.cpu import Meter
from bench.tokens import SIZES

_WARM_UP = 1
_TURNS = 9
_ROUNDS = 3
_FILLER = "Please read what follows, which goes on for quite a while. "
_REPLY = "That is noted. Please go on with what comes next. "


@dataclass(frozen=True, slots=True)
class _First:
    """First message of a conversation, and the number of tokens of its prompt."""

    message: Message
    tokens: int

    @property
    def text(self) -> str:
        """Text of the message."""
        return str(self.message.fields()["content"])


@dataclass(slots=True)
class _Cell:
    """Results for one trainer protocol and one first prompt: CPU in milliseconds and bytes, one median per rollout."""

    cpu: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)

    def add(self, cpu: Sequence[float], sent: Sequence[int]) -> None:
        """Add the turns of a rollout."""
        self.cpu.append(statistics.median(cpu[_WARM_UP:]))
        self.sent.append(statistics.median(sent[_WARM_UP:]))


@dataclass
class _Figures:
    """All results: cells by protocol and index of the first message, and the background CPU."""

    firsts: Sequence[_First]
    cells: dict[str, list[_Cell]] = field(default_factory=dict)
    rests: dict[str, float] = field(default_factory=dict)

    def cell(self, form: str, place: int) -> _Cell:
        """Return the cell for a rollout's turns."""
        return self.cells.setdefault(form, [_Cell() for _ in self.firsts])[place]

    def tables(self) -> Iterator[Table]:
        """Yield the table of results and the table of their growth."""
        rest = ", ".join(f"{what} {took:.1f}" for what, took in self.rests.items())
        caption = f"turns {_WARM_UP + 1} to {_TURNS}\nsubtracted background CPU, ms per second: {rest}"
        table = _table("Server's cost of one turn", caption, "prompt of turn 1, tokens", "CPU ms", "bytes sent")
        for form, cells in self.cells.items():
            for first, cell in zip(self.firsts, cells, strict=True):
                table.add_row(form, f"{first.tokens:,}", f"{min(cell.cpu):.2f}", f"{min(cell.sent):,.0f}")
        yield table
        if len(self.firsts) > 1:
            title = f"Growth from {self.firsts[0].tokens:,} to {self.firsts[-1].tokens:,} tokens"
            growth = _table(title, "factor per turn; 1.00 means no growth", "CPU", "bytes sent")
            for form, (least, *_, most) in self.cells.items():
                cpu, sent = min(most.cpu) / min(least.cpu), min(most.sent) / min(least.sent)
                growth.add_row(form, f"{cpu:.2f}", f"{sent:.2f}")
            yield growth


def main(
    directory: Annotated[
        Path, typer.Argument(help="Directory of a tokenizer with a chat template.", exists=True, file_okay=False)
    ] = TOY_TOKENIZER,
    size: Annotated[list[int] | None, typer.Option(min=100, help="Tokens of the first prompt; repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rollouts per protocol and size.")] = _ROUNDS,
) -> None:
    """Print the cost of a turn with each trainer protocol. Fails if the trainer refuses a turn."""
    command = [sys.executable, "-m", "rollout_server.cli", "trainer", "--port", "0", "--tools-from", ""]
    with subprocess.Popen([*command, "--tokenizer", str(directory)], stderr=subprocess.PIPE, text=True) as child:
        try:
            figures = asyncio.run(_measure(directory, _addresses(child), size or SIZES, rounds))
        except RolloutFailed as failed:
            raise SystemExit(f"bench.dialects: {failed}") from None
        finally:
            child.terminate()
    for table in figures.tables():
        Console(width=100).print(table)


def _table(title: str, caption: str, *headings: str) -> Table:
    table = Table(title=title, caption=caption)
    table.add_column("protocol")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _addresses(child: subprocess.Popen[str]) -> Mapping[str, str]:
    """Return the trainer's URLs by scheme, from its log."""
    assert child.stderr is not None
    lines = []
    for line in child.stderr:
        lines.append(line)
        if line.startswith("strict trainer on"):
            urls = [word for word in line.replace(";", "").split() if "://" in word]
            return {url.partition("://")[0]: url for url in urls}
    raise SystemExit(f"bench.dialects: the trainer did not start\n{''.join(lines)}".rstrip())


async def _measure(directory: Path, urls: Mapping[str, str], sizes: Sequence[int], rounds: int) -> _Figures:
    async with AsyncExitStack() as stack:
        side = samplers.Side(directory)
        stack.push_async_callback(side.close)
        loaded = await side.load()
        figures = _Figures([_first(loaded, size) for size in sizes])
        await _play(side, figures, urls, rounds)
    agent = whole.Timed(_TURNS, _REPLY)
    async for rollout in whole.play(directory, agent, [first.text for first in figures.firsts], rounds):
        figures.cell(rollout.name, rollout.place).add(rollout.cpu, rollout.sent)
    figures.rests["whole server"] = (agent.meter or Meter()).rest
    return figures


async def _play(side: samplers.Side, figures: _Figures, urls: Mapping[str, str], rounds: int) -> None:
    """Measure the samplers. A round runs every protocol and size once, so that other load affects all of them alike."""
    for form in samplers.FORMS:
        warm_up = samplers.spec_of(f"{form.name} warm-up", form, _url(form, urls), figures.firsts[0].message)
        await samplers.play(side, warm_up, 1 + _WARM_UP, _REPLY)
    side.meter = await Meter.at_rest()
    figures.rests["samplers"] = side.meter.rest
    for number in range(rounds):
        for form in samplers.FORMS:
            for place, first in enumerate(figures.firsts):
                spec = samplers.spec_of(f"{form.name} {place} {number}", form, _url(form, urls), first.message)
                costs = await samplers.play(side, spec, _TURNS, _REPLY)
                figures.cell(form.name, place).add([cost.cpu for cost in costs], [cost.sent for cost in costs])


def _url(form: samplers.Form, urls: Mapping[str, str]) -> str:
    return urls["grpc" if form.dialect is Dialect.GRPC else "http"]


def _first(loaded: LoadedTokenizer, size: int) -> _First:
    """Return a user message whose prompt has about `size` tokens."""
    text = _FILLER * (size * 100 // len(loaded.encode(_FILLER * 100)) or 1)
    message = Message.write({"role": "user", "content": text})
    return _First(message, len(loaded.encode(loaded.text([message.fields()], Frame()))))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
