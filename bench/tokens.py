"""`python -m bench.tokens DIRECTORY...`: CPU for the tokens of a turn, compared with rendering and encoding everything again.

A conversation grows to 1k, 8k and 32k tokens. Each turn is one completion with a tool call, and one tool result. The benchmark
measures the CPU of this process and all its threads in three cases: a turn with a mask (HTTP); a turn in token mode, which
renders a short form of the history (R2); and rendering and encoding the whole history. The values are medians of the last
turns; the earlier turns are the warm-up. In token mode, every 16th turn compares the short form with the full rendering (D23):
the column "with checks" is the mean of 16 turns with one comparison. Then 64 rollouts of the longest size run a turn at the
same time, and a task that sleeps on their event loop measures how late it wakes up.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rollout_server.app import tune_interpreter
from rollout_server.core.ledger import pack_tokens
from rollout_server.core.message import Message
from rollout_server.core.record import Answered
from rollout_server.core.spec import TokenizerName
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.tokens.loader import LoaderSettings
from rollout_server.edge.tokens.renderer import Renderer
from rollout_server.edge.tokens.tokenizer import Frame, LoadedTokenizer
from rollout_server.runtime.aio.loop_watchdog import LoopLag
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.testing.tokenizer import TOY_TOKENIZER

SIZES = (1_000, 8_000, 32_000)
_TURNS = 48
_TIMED = 7
"""The last turns, which have the full length, are measured."""
_CHECKED = 16
_ROLLOUTS = 64
_CALL_ID = "a1b2c3d4e"
_WORDS = "The result of this step is written here, with some words, numbers like 8.0 and 12,345, and é. "


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU of one turn in milliseconds: medians, except for `checked`.

    Args:
        tokens: length of the conversation in the last turn, in tokens.
        turn: with a mask.
        short: in token mode.
        checked: mean in token mode, including turns that compare the short form with the full rendering.
        anew: with the whole history rendered and encoded again.
    """

    tokens: int
    turn: float
    short: float
    checked: float
    anew: float


class Talk:
    """A conversation that grows to about `tokens` tokens, in rounds of equal length: a completion and the message after it."""

    def __init__(self, loaded: LoadedTokenizer, tokens: int) -> None:
        self.messages = _packed({"role": "user", "content": "Please work on this step by step."})
        self.last: Answered | None = None
        self.answered = 0
        self._calls = _renders_calls(loaded)
        per_round = max(tokens // _TURNS, 20)
        words = _WORDS * (1 + per_round // 8)
        self._words = words[: max(1, len(words) * per_round // len(loaded.encode(words)) - 60)]
        self._stop = [stop.id for stop in loaded.probed.stops][:1]

    def grow(self) -> None:
        """Add a completion and the message after it."""
        self.answered = len(self.messages)
        completion, environment = self._round()
        self.messages += _packed(completion, environment)
        self.last = Answered(1, self.messages[self.answered], "stop", pack_tokens(self._stop))

    def _round(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if not self._calls:
            return {"role": "assistant", "content": "Go on."}, {"role": "user", "content": self._words}
        return _called('{"a": 5, "b": 8.0}', self._words)


def main(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Directories of tokenizers with chat templates. Default: the toy tokenizer.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Print two tables: CPU by length of the history, and latency of the event loop."""
    console = Console(width=100)
    tune_interpreter()
    asyncio.run(_measure(directories or [TOY_TOKENIZER], console))


async def _measure(directories: Sequence[Path], console: Console) -> None:
    named = {directory.resolve().name: directory.resolve() for directory in directories}
    tokenizers = Tokenizers(LoaderSettings(cache_size=len(named), directories=named, local_files_only=True))
    costs, lags = _cost_table(), _lag_table()
    for name in named:
        loaded = await tokenizers.load(TokenizerName(name))
        for size in SIZES:
            cost = await _cost(loaded, size)
            figures = (cost.turn, cost.short, cost.checked, cost.anew)
            costs.add_row(
                name, str(cost.tokens), *(f"{figure:.1f}" for figure in figures), f"{cost.turn / cost.anew:.2f}"
            )
        lags.add_row(name, *(f"{1000 * late:.1f}" for late in await _lags(loaded)))
    await tokenizers.close()
    console.print(costs)
    console.print(lags)


async def _cost(loaded: LoadedTokenizer, size: int) -> Cost:
    """Grow a conversation to a size and measure its last turns."""
    talk, renderer = Talk(loaded, size), Renderer(loaded, [], {})
    await _turn(renderer, talk)
    token_mode = Renderer(loaded, [], {})
    await token_mode.append(talk.messages, None, 0)
    turns, short, anew = list[float](), list[float](), list[float]()
    for _ in range(_TURNS):
        talk.grow()
        times = [time.process_time()]
        await _turn(renderer, talk)
        times.append(time.process_time())
        await token_mode.append(talk.messages, talk.last, talk.answered)
        times.append(time.process_time())
        ids = await loaded.run(_anew, loaded, talk)
        times.append(time.process_time())
        for figures, (began, ended) in zip((turns, short, anew), pairwise(times), strict=True):
            figures.append(1000 * (ended - began))
    usual = (statistics.median(figures[-_TIMED:]) for figures in (turns, short, anew))
    turn, alone, whole = usual
    return Cost(ids, turn, alone, statistics.mean(short[-_CHECKED:]), whole)


async def _lags(loaded: LoadedTokenizer) -> tuple[float, float, float]:
    """Return how late a sleeping task wakes up while many rollouts run a turn.

    The values are the median, 99th percentile and maximum in seconds.
    """
    talk, renderers = Talk(loaded, SIZES[-1]), [Renderer(loaded, [], {}) for _ in range(_ROLLOUTS)]
    for _ in range(_TURNS - 1):
        talk.grow()
    await asyncio.gather(*(_turn(renderer, talk) for renderer in renderers))
    talk.grow()
    late: list[float] = []
    lag = LoopLag(late.append, 0.001)
    lag.start()
    await asyncio.gather(*(_turn(renderer, talk) for renderer in renderers))
    await lag.stop()
    late.sort()
    return statistics.median(late), late[int(0.99 * (len(late) - 1))], late[-1]


async def _turn(renderer: Renderer, talk: Talk) -> None:
    await renderer.predict(talk.messages, talk.last, talk.answered)


def _anew(loaded: LoadedTokenizer, talk: Talk) -> int:
    fields = [message.fields() for message in talk.messages]
    return len(loaded.encode(loaded.text(fields, Frame())))


def _renders_calls(loaded: LoadedTokenizer) -> bool:
    """Return whether the chat template renders tool results."""
    try:
        return "Zq9" in loaded.text([{"role": "user", "content": "?"}, *_called("{}", "Zq9")], Frame())
    except RolloutFailed:
        return False


def _called(arguments: str, result: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a completion with a tool call, and the tool result."""
    function = {"name": "look", "arguments": arguments}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    completion = {"role": "assistant", "content": "Let me look.", "tool_calls": [call]}
    return completion, {"role": "tool", "tool_call_id": _CALL_ID, "name": "look", "content": result}


def _cost_table() -> Table:
    table = Table(title="CPU for the tokens of one turn (ms, medians)")
    for heading in ("tokenizer", "context", "with mask", "token mode", "with checks", "full", "mask / full"):
        table.add_column(heading, justify="left" if heading == "tokenizer" else "right")
    return table


def _lag_table() -> Table:
    table = Table(title=f"Latency of the event loop while {_ROLLOUTS} rollouts of {SIZES[-1]:,} tokens run a turn (ms)")
    for heading in ("tokenizer", "median", "99 %", "max"):
        table.add_column(heading, justify="left" if heading == "tokenizer" else "right")
    return table


def _packed(*messages: dict[str, Any]) -> list[Message]:
    return [Message.parse(json.dumps(message)) for message in messages]


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
