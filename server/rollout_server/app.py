"""The composition root: one process with the gRPC server, the runtime and the HTTP gateway.

Only `app` and `cli` know all rooms. Whatever is slow to import is imported where it is used.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from osmosis.rollout.v1 import spec_pb2

from rollout_server.agent import Agent
from rollout_server.core.admission import Bounds
from rollout_server.core.error import InvalidRequest, NotPossible, Violation
from rollout_server.core.spec import Dialect, DriftPolicy
from rollout_server.edge.rpc.server import RpcServer, RpcSettings
from rollout_server.edge.rpc.service import RolloutService, ServerFacts
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.tokens.source import TokenizerSettings
from rollout_server.edge.trainer.client import HttpClient, HttpSettings
from rollout_server.edge.trainer.masked import Trainers
from rollout_server.runtime.roster import Roster
from rollout_server.runtime.wish import Capacity, Wish
from rollout_server.settings import TOY, Settings, load

if TYPE_CHECKING:
    from rollout_server.http import HttpServer

_log = logging.getLogger(__name__)
FEATURES = ("http_masked",)


class Server:
    """The whole service: `async with Server([agent], settings) as server: ...`."""

    def __init__(self, agents: Sequence[Agent], settings: Settings) -> None:
        self.settings = settings
        self.grpc_port = 0
        self.http_port = 0
        self._agents = agents
        self._stack = AsyncExitStack()
        self._roster: Roster
        self._rpc: RpcServer
        self._http: HttpServer | None = None

    async def __aenter__(self) -> Self:
        """Starts. Raises RuntimeError or OSError where a port cannot be had."""
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends whatever still runs, and stops."""
        await self._roster.drain(0)
        await self._stack.aclose()

    async def drain(self) -> None:
        """Says that it is not serving, takes nothing new, and lets rollouts finish."""
        await self._rpc.say_not_serving()
        await self._roster.drain(self.settings.drain_seconds)

    async def _start(self) -> None:
        settings = self.settings
        tokenizers = Tokenizers(tokenizer_settings(settings))
        self._stack.push_async_callback(tokenizers.close)
        client = HttpClient(
            HttpSettings(timeout=settings.trainer_timeout_seconds, connections=settings.trainer_connections)
        )
        self._stack.push_async_callback(client.close)
        self._roster = _roster(self._agents, Trainers(client, tokenizers), settings)
        # Over TCP the gateway could reach another process, and under mTLS it would need a certificate (D9).
        socket = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-"))) / "grpc.sock"
        self._rpc = RpcServer(
            RolloutService(self._roster, _facts(settings)),
            RpcSettings(
                (f"unix:{socket}", f"{_bracketed(settings.host)}:{settings.grpc_port}"),
                settings.max_request_bytes + 1024 * 1024,
            ),
        )
        _, self.grpc_port = await self._rpc.start()
        self._stack.push_async_callback(self._rpc.stop, 1.0)
        if settings.http:
            await self._start_http(socket)
        cleaning = asyncio.create_task(_forget(self._roster, settings.cleanup_seconds), name="forget")
        self._stack.callback(cleaning.cancel)

    async def _start_http(self, socket: Path) -> None:
        from rollout_gateway.files import KeyPair
        from rollout_gateway.serve import Listening
        from rollout_gateway.settings import GatewaySettings
        from rollout_gateway.tls import TlsFiles

        from rollout_server.http import HttpServer  # a server without HTTP needs no FastAPI

        settings = self.settings
        tls = None
        if settings.tls_cert is not None and settings.tls_key is not None:
            tls = TlsFiles(KeyPair(settings.tls_cert, settings.tls_key), settings.tls_client_ca)
        gateway = GatewaySettings(
            detach_grace_seconds=settings.detach_grace_seconds,
            max_body_bytes=settings.max_request_bytes,
            max_metadata_bytes=settings.max_metadata_bytes,
        )
        self._http = HttpServer(f"unix:{socket}", Listening(settings.host, settings.http_port, tls), gateway)
        self.http_port = await self._http.start()
        self._stack.push_async_callback(self._http.stop)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def serve(*agents: Agent, **settings: object) -> None:
    """Serves agents until SIGTERM or Ctrl-C: one process, gRPC and HTTP. Settings may be given by their field names."""
    from rollout_server import logs

    chosen = load(**settings)
    logs.set_up(chosen.log_format, chosen.log_level)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(agents, chosen))


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop's loop, where there is one."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


async def _serve(agents: Sequence[Agent], settings: Settings) -> None:
    began = time.monotonic()
    signals = _Signals()
    async with Server(agents, settings) as server:
        where = f"gRPC on port {server.grpc_port}" + (f", HTTP on port {server.http_port}" if settings.http else "")
        _log.info("serving %s (%.2f s)", where, time.monotonic() - began)
        await signals.first.wait()
        _log.info("stopping: rollouts may go on for %g s; a second signal ends them", settings.drain_seconds)
        await _first_of(server.drain(), signals.second.wait())


class _Signals:
    """The first SIGTERM or SIGINT, and the second."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError):
                loop.add_signal_handler(number, self._came)

    def _came(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _first_of(*coroutines: object) -> None:
    tasks = [asyncio.ensure_future(c) for c in coroutines]  # type: ignore[call-overload]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def _forget(roster: Roster, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        roster.forget()


def _roster(agents: Sequence[Agent], trainers: Trainers, settings: Settings) -> Roster:
    return Roster(
        agents,
        trainers.open,
        lambda: secrets.token_hex(10),
        capacity=Capacity(
            running=settings.max_running,
            queued=settings.max_queued,
            finished=settings.max_records,
            finished_bytes=settings.max_record_bytes,
            finished_seconds=settings.record_ttl_seconds,
        ),
        bounds=Bounds(
            seconds=settings.max_seconds,
            default_seconds={Dialect.HTTP_MASKED: settings.timeout_seconds},
            on_drift=DriftPolicy(settings.on_drift),
            metadata_bytes=settings.max_metadata_bytes,
        ),
    )


def tokenizer_settings(settings: Settings) -> TokenizerSettings:
    """Where tokenizers come from, with the word for the built-in one replaced by its directory."""
    from rollout_server.testing.tokenizer import TOY_TOKENIZER

    directories = {name: TOY_TOKENIZER if str(path) == TOY else path for name, path in settings.tokenizers.items()}
    return TokenizerSettings(
        cache_size=settings.tokenizer_cache_size,
        trust_remote_code=settings.tokenizer_trust_remote_code,
        directories=directories,
        templates=settings.templates,
        allow_directories=settings.tokenizer_directories,
        local_files_only=settings.tokenizers_offline,
    )


def _facts(settings: Settings) -> ServerFacts:
    from rollout_server import __version__

    return ServerFacts(__version__, FEATURES, settings.max_request_bytes, time.time(), check)


def check(wish: Wish) -> None:
    """Refuses what this server cannot run, rather than run something else. Raises `NotPossible` or `InvalidRequest`."""
    spec = wish.spec
    if spec.completions.dialect is not Dialect.HTTP_MASKED:
        text = f"trainers of dialect {spec.completions.dialect.value} are not served by this version; use http:// or https://"
        raise NotPossible(text, reason="DIALECT_UNSUPPORTED")
    for name, target in (("outcome", spec.outcome), ("tools", spec.tools)):
        if target is not None:
            raise NotPossible(f"spec.{name} is not served by this version; leave it unset", reason="TARGET_UNSUPPORTED")
    if spec.on_interrupt == spec_pb2.INTERRUPT_POLICY_RESUME:
        raise NotPossible(
            "rollouts are not resumed by this version; leave on_interrupt unset", reason="RESUME_UNSUPPORTED"
        )
    if spec.token_mode == spec_pb2.TOKEN_MODE_TOKENS:
        raise NotPossible("token mode needs a gRPC trainer", reason="TOKEN_MODE_UNSUPPORTED")
    bearer = wish.credentials.completions
    if not bearer.isascii() or not bearer.isprintable():
        raise InvalidRequest(
            Violation("credentials.completions_bearer", "must be printable ASCII: it becomes an HTTP header")
        )
