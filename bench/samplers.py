"""Cost of a turn in the samplers alone, each against the strict trainer in another process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osmosis.rollout.v1 import spec_pb2
from rollout_server.core.limits import Limits
from rollout_server.core.machine import LimitReached, Machine
from rollout_server.core.message import Message
from rollout_server.core.record import Appended
from rollout_server.core.spec import Dialect, Sampling, Spec, Target, TokenizerName
from rollout_server.edge.grpc_channels import Channels
from rollout_server.edge.rpc.tls import ClientTls
from rollout_server.edge.targets.resolver import CheckedLookup
from rollout_server.edge.targets.rules import TargetRules
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.tokens.loader import LoaderSettings
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer
from rollout_server.edge.trainer.grpc_sampler import CompletionTrainers
from rollout_server.edge.trainer.http_client import HttpClient, HttpRequest, HttpResponse, HttpSettings
from rollout_server.edge.trainer.http_masked_sampler import MaskedTrainers
from rollout_server.edge.trainer.http_plain_sampler import PlainTrainers
from rollout_server.edge.trainer.retry import RetryPolicy
from rollout_server.runtime.ports import CompletionRequest, Sampler

from bench.cpu import Meter

_TIMEOUT_SECONDS = 60.0
_NAME = TokenizerName("measured")


@dataclass(frozen=True, slots=True)
class Form:
    """A trainer protocol. `token_mode` is a proto `TokenMode`; HTTP has none."""

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
    """Cost of one turn: CPU in milliseconds, and bytes sent."""

    cpu: float
    sent: int


class _CountingClient(HttpClient):
    """HTTP client that reports the length of each body to `sent`."""

    def __init__(self, settings: HttpSettings, sent: Callable[[int], None]) -> None:
        super().__init__(settings)
        self._sent = sent

    async def post(self, request: HttpRequest) -> HttpResponse:
        self._sent(len(request.body))
        return await super().post(request)


class _CountingChannels(Channels):
    """gRPC channels that report the length of each request to `sent`."""

    def __init__(self, lookup: CheckedLookup, sent: Callable[[int], None]) -> None:
        super().__init__(lookup, ClientTls())
        self._sent = sent

    @asynccontextmanager
    async def use(self, url: str) -> AsyncIterator[Any]:
        async with super().use(url) as channel:
            yield _CountingChannel(channel, self._sent)


class _CountingChannel:
    """Channel whose unary calls report the length of requests. Forwards everything else."""

    def __init__(self, channel: Any, sent: Callable[[int], None]) -> None:
        self._channel = channel
        self._sent = sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def unary_unary(self, method: str, request_serializer: Callable[[Any], bytes] = bytes, **options: Any) -> Any:
        def counted(request: Any) -> bytes:
            content = request_serializer(request)
            self._sent(len(content))
            return content

        return self._channel.unary_unary(method, request_serializer=counted, **options)


class Side:
    """The server's side of a turn: what its samplers share, the bytes that they have sent, and the CPU meter."""

    def __init__(self, directory: Path) -> None:
        self.sent = 0
        self.meter = Meter()
        self.tokenizers = Tokenizers(LoaderSettings(directories={_NAME.name: directory}, local_files_only=True))
        lookup = CheckedLookup(TargetRules.parse((), ("http", "https", "grpc", "grpcs")))
        self._client = _CountingClient(HttpSettings(), self._count)
        self._channels = _CountingChannels(lookup, self._count)

    def _count(self, size: int) -> None:
        self.sent += size

    def open(self, spec: Spec) -> Sampler:
        """Return the sampler of one rollout."""
        match spec.completions.dialect:
            case Dialect.HTTP_MASKED:
                return MaskedTrainers(self._client, self.tokenizers).open(spec, ())
            case Dialect.HTTP_PLAIN:
                return PlainTrainers(self._client, RetryPolicy()).open(spec)
            case Dialect.GRPC:
                trainers = CompletionTrainers(self._channels, self.tokenizers, RetryPolicy(), _TIMEOUT_SECONDS)
                return trainers.open(spec.rollout_id, spec, ())

    async def load(self) -> LoadedTokenizer:
        """Return the loaded tokenizer."""
        return await self.tokenizers.load(_NAME)

    async def close(self) -> None:
        """Close connections and stop threads."""
        await self._channels.close()
        await self._client.close()
        await self.tokenizers.close()


def spec_of(name: str, form: Form, url: str, message: Message) -> Spec:
    """Return the spec of a rollout that starts with this message."""
    return Spec(
        name.replace(", ", "-").replace(" ", "-"),
        (message,),
        Target(url, form.dialect),
        sampling=Sampling(),
        tokenizer=None if form.token_mode == spec_pb2.TOKEN_MODE_MESSAGES else _NAME,
        token_mode=form.token_mode,
    )


async def play(side: Side, spec: Spec, turns: int, reply: str) -> Sequence[Cost]:
    """Run turns with the same user `reply` after each completion, and return the cost of each turn.

    Raises `RolloutFailed` if the trainer refuses a turn.
    """
    sampler, machine, costs = side.open(spec), Machine(spec.rollout_id, spec.messages, Limits()), list[Cost]()
    for _ in range(turns):
        main, requested = machine.main, machine.request_completion()
        if isinstance(requested, LimitReached):
            raise RuntimeError("a rollout without limits reached a limit")
        before = main.messages, main.last_completion, main.turn_messages, main.line
        sent, taken = side.sent, side.meter.start()
        completed = await sampler.sample(CompletionRequest(requested, *before, sampling=spec.sampling))
        costs.append(Cost(taken(), side.sent - sent))
        for record in (requested, completed, Appended((Message.write({"role": "user", "content": reply}),))):
            machine.accept(record)
    return costs
