"""`python -m bench.dialects [DIRECTORY]`: what a turn costs this side in each form that trainers speak, as the history grows.

A conversation begins with a prompt of 1k, 8k or 32k tokens and goes on for some turns against the strict trainer, which runs in a
process of its own. Counted are the CPU of this process and the bytes of each request. In token mode both should stay flat.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rollout_server.core.message import Message
from rollout_server.core.record import Answered, Asked
from rollout_server.core.spec import Dialect, Sampling, Spec, Target, TokenizerName
from rollout_server.edge.channels import Channels
from rollout_server.edge.rpc.tls import ClientTls
from rollout_server.edge.rpc.wire.completion import Request
from rollout_server.edge.targets.lookup import CheckedLookup
from rollout_server.edge.targets.rules import TargetRules
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.tokens.source import TokenizerSettings
from rollout_server.edge.trainer.client import HttpAnswer, HttpClient, HttpRequest, HttpSettings
from rollout_server.edge.trainer.completion import CompletionSampler, CompletionTrainers
from rollout_server.edge.trainer.masked import MaskedTrainers
from rollout_server.edge.trainer.retry import Retries
from rollout_server.runtime.port import Ask, Sampler
from rollout_server.testing.tokenizer import TOY_TOKENIZER

SIZES = (1_000, 8_000, 32_000)
_TURNS = 9
_HEARD = "That is noted. Please go on with what comes next. "


class _CountingClient(HttpClient):
    """Tells `sent` how long each body is."""

    def __init__(self, settings: HttpSettings, sent: Callable[[int], None]) -> None:
        super().__init__(settings)
        self._sent = sent

    async def post(self, request: HttpRequest) -> HttpAnswer:
        self._sent(len(request.body))
        return await super().post(request)


class _CountingSampler(CompletionSampler):
    """Puts the size of each request into `sizes`."""

    sizes: list[int]

    def _request(self, *arguments: object) -> Request:
        request = super()._request(*arguments)  # type: ignore[arg-type]
        self.sizes.append(request.ByteSize())
        return request


def main(
    directory: Annotated[Path, typer.Argument(help="A tokenizer with a chat template.", exists=True)] = TOY_TOKENIZER,
) -> None:
    """Print a table."""
    command = [sys.executable, "-m", "rollout_server.cli", "trainer", "--port", "0", "--tools-from", ""]
    with subprocess.Popen([*command, "--tokenizer", str(directory)], stderr=subprocess.PIPE, text=True) as child:
        try:
            http, grpc = _addresses(child)
            asyncio.run(_measure(directory, http, grpc, Console(width=100)))
        finally:
            child.terminate()


def _addresses(child: subprocess.Popen[str]) -> tuple[str, str]:
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith("strict trainer on"):
            words = line.replace(";", "").split()
            return next(word for word in words if word.startswith("http:")), words[-1]
    raise SystemExit("the trainer did not start")


async def _measure(directory: Path, http: str, grpc: str, console: Console) -> None:
    table = Table(title="This side's share of a turn, by form and length of history; medians")
    for heading in ("form", "history", "CPU ms", "bytes sent"):
        table.add_column(heading, justify="left" if heading == "form" else "right")
    tokenizers = Tokenizers(TokenizerSettings(directories={"t": directory}, local_files_only=True))
    channels = Channels(CheckedLookup(TargetRules.parse((), ("http", "https", "grpc", "grpcs"))), ClientTls())
    sizes: list[int] = []
    client = _CountingClient(HttpSettings(), sizes.append)
    for form, target, mode in (
        ("HTTP with masks", Target(http, Dialect.HTTP_MASKED), 0),
        ("gRPC, messages", Target(grpc, Dialect.GRPC), 1),
        ("gRPC, tokens", Target(grpc, Dialect.GRPC), 2),
    ):
        for size in SIZES:
            spec = _spec(f"{form} {size}".replace(" ", "-"), target, mode, size)
            if target.dialect is Dialect.GRPC:
                trainers = CompletionTrainers(channels, tokenizers, Retries(), 60.0)
                sampler: Sampler = _CountingSampler(trainers, spec.rollout_id, spec, ())
                sampler.sizes = sizes  # type: ignore[attr-defined]
            else:
                sampler = MaskedTrainers(client, tokenizers).open(spec, ())
            sizes.clear()
            costs = await _play(sampler, spec)
            table.add_row(form, str(size), f"{statistics.median(costs[1:]):.2f}", f"{statistics.median(sizes[1:]):.0f}")
    await channels.close()
    await client.close()
    await tokenizers.close()
    console.print(table)


def _spec(rollout_id: str, target: Target, mode: int, size: int) -> Spec:
    asked = {"role": "user", "content": "one two three four " * (size // 5)}
    return Spec(
        rollout_id,
        (Message.write(asked),),
        target,
        sampling=Sampling(),
        tokenizer=TokenizerName("t") if mode != 1 else None,
        token_mode=mode,
    )


async def _play(sampler: Sampler, spec: Spec) -> list[float]:
    """CPU of each turn in milliseconds."""
    messages, last, answered, costs = list(spec.messages), None, 0, list[float]()
    for turn in range(1, _TURNS + 1):
        asked = Asked(turn, "0", f"{spec.rollout_id}/0/{turn}", len(messages))
        began = time.process_time()
        last_answer: Answered = await sampler.sample(Ask(asked, messages, last, answered))
        costs.append(1000 * (time.process_time() - began))
        last, answered = last_answer, len(messages)
        messages += [last_answer.message, Message.write({"role": "user", "content": _HEARD})]
    return costs


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
