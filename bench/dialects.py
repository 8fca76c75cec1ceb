"""`python -m bench.dialects [DIRECTORY]`: what a turn costs this side in each form that trainers speak, as the history grows.

A conversation begins with a prompt of about 1k, 8k or 32k tokens, or `--size`, and goes on for some turns against the strict
trainer, which runs in a process of its own. The first turn is the warm-up: it opens the connection and carries the whole prompt.
Of the turns after it are told, as medians:

* CPU of this process with all its threads, from asking for an answer to having it: rendering, encoding, writing and reading.
* Bytes of the requests' bodies, of those that were repeated too; no headers, nothing of TCP, nothing of the answers.

The rows of whole servers (`bench.whole`) also hold the rollout around the sampler, over a stream of the trainer's and without.

In token mode both should stay flat. Elsewhere an answer brings the ids of its whole prompt, and reading them is CPU too.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from osmosis.rollout.v1 import spec_pb2
from rich.console import Console
from rich.table import Table
from rollout_server.core.message import Message
from rollout_server.core.record import Answered, Asked
from rollout_server.core.spec import Dialect, Sampling, Spec, Target, TokenizerName
from rollout_server.edge.channels import Channels
from rollout_server.edge.rpc.tls import ClientTls
from rollout_server.edge.targets.lookup import CheckedLookup
from rollout_server.edge.targets.rules import TargetRules
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.tokens.loaded import Frame, LoadedTokenizer
from rollout_server.edge.tokens.source import TokenizerSettings
from rollout_server.edge.trainer.client import HttpAnswer, HttpClient, HttpRequest, HttpSettings
from rollout_server.edge.trainer.completion import CompletionTrainers
from rollout_server.edge.trainer.masked import MaskedTrainers
from rollout_server.edge.trainer.plain import PlainTrainers
from rollout_server.edge.trainer.retry import Retries
from rollout_server.runtime.port import Ask, Failed, Sampler
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from bench.tokens import SIZES
from bench.whole import Timed, play

_WARM_UP = 1
_TURNS = 9
_TIMEOUT_SECONDS = 60.0
_NAME = TokenizerName("measured")
_ASKED = "Please read what follows, which goes on for quite a while. "
_HEARD = "That is noted. Please go on with what comes next. "


@dataclass(frozen=True, slots=True)
class Form:
    """A form that trainers speak. `token_mode` is a `TokenMode` of the contract; HTTP has none."""

    name: str
    dialect: Dialect
    token_mode: int = spec_pb2.TOKEN_MODE_UNSPECIFIED


FORMS = (
    Form("HTTP, masks", Dialect.HTTP_MASKED),
    Form("HTTP, no masks", Dialect.HTTP_PLAIN),
    Form("gRPC, messages", Dialect.GRPC, spec_pb2.TOKEN_MODE_MESSAGES),
    Form("gRPC, tokens", Dialect.GRPC, spec_pb2.TOKEN_MODE_TOKENS),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """One turn: CPU in milliseconds, and bytes sent."""

    cpu: float
    sent: int


class _CountingClient(HttpClient):
    """Tells `sent` how long each body is."""

    def __init__(self, settings: HttpSettings, sent: Callable[[int], None]) -> None:
        super().__init__(settings)
        self._sent = sent

    async def post(self, request: HttpRequest) -> HttpAnswer:
        self._sent(len(request.body))
        return await super().post(request)


class _CountingChannels(Channels):
    """Tells `sent` how long each request is."""

    def __init__(self, lookup: CheckedLookup, sent: Callable[[int], None]) -> None:
        super().__init__(lookup, ClientTls())
        self._sent = sent

    @asynccontextmanager
    async def use(self, url: str) -> AsyncIterator[Any]:
        async with super().use(url) as channel:
            yield _CountingChannel(channel, self._sent)


class _CountingChannel:
    """A channel whose stubs count; all else is the channel's own."""

    def __init__(self, channel: Any, sent: Callable[[int], None]) -> None:
        self._channel = channel
        self._sent = sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def unary_unary(self, method: str, request_serializer: Callable[[Any], bytes], **options: Any) -> Any:
        def counted(request: Any) -> bytes:
            content = request_serializer(request)
            self._sent(len(content))
            return content

        return self._channel.unary_unary(method, request_serializer=counted, **options)


class _Side:
    """This side: what its samplers share, and how many bytes they have sent."""

    def __init__(self, directory: Path) -> None:
        self.sent = 0
        self.tokenizers = Tokenizers(TokenizerSettings(directories={_NAME.name: directory}, local_files_only=True))
        lookup = CheckedLookup(TargetRules.parse((), ("http", "https", "grpc", "grpcs")))
        self._client = _CountingClient(HttpSettings(), self._count)
        self._channels = _CountingChannels(lookup, self._count)

    def _count(self, size: int) -> None:
        self.sent += size

    def open(self, spec: Spec) -> Sampler:
        """The sampler of one rollout."""
        match spec.completions.dialect:
            case Dialect.HTTP_MASKED:
                return MaskedTrainers(self._client, self.tokenizers).open(spec, ())
            case Dialect.HTTP_PLAIN:
                return PlainTrainers(self._client, Retries()).open(spec)
            case Dialect.GRPC:
                trainers = CompletionTrainers(self._channels, self.tokenizers, Retries(), _TIMEOUT_SECONDS)
                return trainers.open(spec.rollout_id, spec, ())

    async def close(self) -> None:
        """Ends connections and threads."""
        await self._channels.close()
        await self._client.close()
        await self.tokenizers.close()


def main(
    directory: Annotated[
        Path, typer.Argument(help="A tokenizer with a chat template.", exists=True, file_okay=False)
    ] = TOY_TOKENIZER,
    size: Annotated[list[int] | None, typer.Option(min=100, help="Tokens of the first prompt, repeatable.")] = None,
) -> None:
    """Print a table. Fails where the trainer refused a turn."""
    command = [sys.executable, "-m", "rollout_server.cli", "trainer", "--port", "0", "--tools-from", ""]
    with subprocess.Popen([*command, "--tokenizer", str(directory)], stderr=subprocess.PIPE, text=True) as child:
        try:
            table = asyncio.run(_measure(directory, _addresses(child), size or SIZES))
        except Failed as failed:
            raise SystemExit(f"bench.dialects: {failed}") from None
        finally:
            child.terminate()
    Console(width=100).print(table)


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


async def _measure(directory: Path, urls: Mapping[str, str], sizes: Sequence[int]) -> Table:
    table = Table(
        title="This side's share of a turn",
        caption=f"medians of turns {_WARM_UP + 1} to {_TURNS}; CPU of this process alone; bodies of requests, no headers",
    )
    for heading in ("form", "prompt of turn 1, tokens", "CPU ms", "bytes sent"):
        table.add_column(heading, justify="left" if heading == "form" else "right")
    async with AsyncExitStack() as stack:
        side = _Side(directory)
        stack.push_async_callback(side.close)
        loaded = await side.tokenizers.load(_NAME)
        for form in FORMS:
            url = urls["grpc" if form.dialect is Dialect.GRPC else "http"]
            for size in sizes:
                message, tokens = _first(loaded, size)
                spec = _spec(f"{form.name} {size}", form, url, message)
                costs = (await _play(side, spec))[_WARM_UP:]
                cpu, sent = (
                    statistics.median(values) for values in zip(*((c.cpu, c.sent) for c in costs), strict=True)
                )
                table.add_row(form.name, f"{tokens:,}", f"{cpu:.2f}", f"{sent:,.0f}")
        firsts = [_first(loaded, size) for size in sizes]
        texts = [str(message.fields()["content"]) for message, _ in firsts]
        prompts = [f"{tokens:,}" for _, tokens in firsts] * 2
        whole = [each async for each in play(directory, Timed(_TURNS, _HEARD), texts)]
        for played, tokens in zip(whole, prompts, strict=True):
            cpu, sent = (statistics.median(values[_WARM_UP:]) for values in (played.cpu, played.sent))
            table.add_row(played.name, tokens, f"{cpu:.2f}", f"{sent:,.0f}")
    return table


def _first(loaded: LoadedTokenizer, size: int) -> tuple[Message, int]:
    """A user's message of about `size` tokens, and how many its prompt has."""
    text = _ASKED * (size * 100 // len(loaded.encode(_ASKED * 100)) or 1)
    asked = Message.write({"role": "user", "content": text})
    return asked, len(loaded.encode(loaded.text([asked.fields()], Frame())))


def _spec(name: str, form: Form, url: str, message: Message) -> Spec:
    return Spec(
        name.replace(", ", "-").replace(" ", "-"),
        (message,),
        Target(url, form.dialect),
        sampling=Sampling(),
        tokenizer=None if form.token_mode == spec_pb2.TOKEN_MODE_MESSAGES else _NAME,
        token_mode=form.token_mode,
    )


async def _play(side: _Side, spec: Spec) -> list[Cost]:
    """What each turn cost. Raises `Failed` where the trainer refuses one."""
    sampler, messages = side.open(spec), list(spec.messages)
    last: Answered | None = None
    answered, costs = 0, list[Cost]()
    for turn in range(1, _TURNS + 1):
        asked = Asked(turn, "0", f"{spec.rollout_id}/0/{turn}", len(messages))
        sent, began = side.sent, time.process_time()
        last = await sampler.sample(Ask(asked, messages, last, answered))
        costs.append(Cost(1000 * (time.process_time() - began), side.sent - sent))
        answered = len(messages)
        messages += [last.message, Message.write({"role": "user", "content": _HEARD})]
    return costs


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
