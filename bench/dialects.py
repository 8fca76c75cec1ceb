"""`python -m bench.dialects [DIRECTORY]`: what a turn costs this side in each form that trainers speak, as the history grows.

A conversation begins with a prompt of about 1k, 8k or 32k tokens, or `--size`, and goes on for some turns against the strict
trainer, which runs in a process of its own. The first turn is the warm-up: it opens the connection and carries the whole prompt.
Of the turns after it are told:

* CPU of this process with all its threads, from asking for an answer to having it: rendering, encoding, writing and reading. It is
  the median of a rollout's turns, of several rollouts the least: what else runs on the machine can only add to it.
* Bytes of the requests' bodies, of those that were repeated too; no headers, nothing of TCP, nothing of the answers.

What this process takes while it only waits is taken off, for the time of each turn (`bench.cpu`): the strict trainer renders and
judges the whole history anew each turn, so that a longer one is also a longer wait.

The rows of whole servers (`bench.whole`) also hold the rollout around the sampler.

In token mode both should stay flat, as the second table says. Elsewhere an answer brings the ids of its whole prompt, and reading
them is CPU too.
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
_ASKED = "Please read what follows, which goes on for quite a while. "
_HEARD = "That is noted. Please go on with what comes next. "


@dataclass(frozen=True, slots=True)
class _First:
    """The message with which a conversation begins, and how many tokens its prompt has."""

    message: Message
    tokens: int

    @property
    def text(self) -> str:
        """Of the message."""
        return str(self.message.fields()["content"])


@dataclass(slots=True)
class _Cell:
    """One form with one first prompt: CPU in milliseconds and bytes, a median of each rollout."""

    cpu: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)

    def add(self, cpu: Sequence[float], sent: Sequence[int]) -> None:
        """Takes the turns of a rollout."""
        self.cpu.append(statistics.median(cpu[_WARM_UP:]))
        self.sent.append(statistics.median(sent[_WARM_UP:]))


@dataclass
class _Figures:
    """What was measured: cells by form and place of the first message, and what waiting took."""

    firsts: Sequence[_First]
    cells: dict[str, list[_Cell]] = field(default_factory=dict)
    rests: dict[str, float] = field(default_factory=dict)

    def cell(self, form: str, place: int) -> _Cell:
        """Where a rollout's turns go."""
        return self.cells.setdefault(form, [_Cell() for _ in self.firsts])[place]

    def tables(self) -> Iterator[Table]:
        """All figures, and how they grow."""
        rest = ", ".join(f"{what} {took:.1f}" for what, took in self.rests.items())
        caption = f"turns {_WARM_UP + 1} to {_TURNS}\nCPU ms a second of waiting, taken off: {rest}"
        table = _table("This side's share of a turn", caption, "prompt of turn 1, tokens", "CPU ms", "bytes sent")
        for form, cells in self.cells.items():
            for first, cell in zip(self.firsts, cells, strict=True):
                table.add_row(form, f"{first.tokens:,}", f"{min(cell.cpu):.2f}", f"{min(cell.sent):,.0f}")
        yield table
        if len(self.firsts) > 1:
            title = f"{self.firsts[-1].tokens:,} tokens beside {self.firsts[0].tokens:,}"
            growth = _table(title, "how many times as much a turn takes", "CPU", "bytes sent")
            for form, (least, *_, most) in self.cells.items():
                cpu, sent = min(most.cpu) / min(least.cpu), min(most.sent) / min(least.sent)
                growth.add_row(form, f"{cpu:.2f}", f"{sent:.2f}")
            yield growth


def main(
    directory: Annotated[
        Path, typer.Argument(help="A tokenizer with a chat template.", exists=True, file_okay=False)
    ] = TOY_TOKENIZER,
    size: Annotated[list[int] | None, typer.Option(min=100, help="Tokens of the first prompt, repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rollouts of each form and size.")] = _ROUNDS,
) -> None:
    """Print two tables. Fails where the trainer refused a turn."""
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
    table.add_column("form")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _addresses(child: subprocess.Popen[str]) -> Mapping[str, str]:
    """Where the trainer listens, by scheme."""
    assert child.stderr is not None
    said = []
    for line in child.stderr:
        said.append(line)
        if line.startswith("strict trainer on"):
            urls = [word for word in line.replace(";", "").split() if "://" in word]
            return {url.partition("://")[0]: url for url in urls}
    raise SystemExit(f"bench.dialects: the trainer did not start\n{''.join(said)}".rstrip())


async def _measure(directory: Path, urls: Mapping[str, str], sizes: Sequence[int], rounds: int) -> _Figures:
    async with AsyncExitStack() as stack:
        side = samplers.Side(directory)
        stack.push_async_callback(side.close)
        loaded = await side.load()
        figures = _Figures([_first(loaded, size) for size in sizes])
        await _play(side, figures, urls, rounds)
    agent = whole.Timed(_TURNS, _HEARD)
    async for played in whole.play(directory, agent, [first.text for first in figures.firsts], rounds):
        figures.cell(played.name, played.place).add(played.cpu, played.sent)
    figures.rests["whole server"] = (agent.meter or Meter()).rest
    return figures


async def _play(side: samplers.Side, figures: _Figures, urls: Mapping[str, str], rounds: int) -> None:
    """The samplers' rows. A round takes each form and size in turn, so that what else the machine does meets all of them."""
    for form in samplers.FORMS:
        warm_up = samplers.spec_of(f"{form.name} warm-up", form, _url(form, urls), figures.firsts[0].message)
        await samplers.play(side, warm_up, 1 + _WARM_UP, _HEARD)
    side.meter = await Meter.at_rest()
    figures.rests["samplers"] = side.meter.rest
    for number in range(rounds):
        for form in samplers.FORMS:
            for place, first in enumerate(figures.firsts):
                spec = samplers.spec_of(f"{form.name} {place} {number}", form, _url(form, urls), first.message)
                costs = await samplers.play(side, spec, _TURNS, _HEARD)
                figures.cell(form.name, place).add([cost.cpu for cost in costs], [cost.sent for cost in costs])


def _url(form: samplers.Form, urls: Mapping[str, str]) -> str:
    return urls["grpc" if form.dialect is Dialect.GRPC else "http"]


def _first(loaded: LoadedTokenizer, size: int) -> _First:
    """A user's message whose prompt has about `size` tokens."""
    text = _ASKED * (size * 100 // len(loaded.encode(_ASKED * 100)) or 1)
    asked = Message.write({"role": "user", "content": text})
    return _First(asked, len(loaded.encode(loaded.text([asked.fields()], Frame()))))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
