"""The composition root: one process with the gRPC server, the runtime and the HTTP gateway.

Only `app`, `assembly`, `serving` and `cli` may import every package. Modules that are slow to import are imported inside functions.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rollout_server.agent import Agent
from rollout_server.assembly import (
    delivery_retry_policy,
    further_models,
    http_client,
    keyring,
    make_registry,
    make_streams,
    naming_journal,
    open_journal,
    reporter,
    server_facts,
    server_tls,
    synchronous_key,
    target_rules,
    tokenizer_settings,
    tool_resources,
    toolset_connector,
    tracing_of_process,
    trainers,
)
from rollout_server.edge.api_keys import Keyring
from rollout_server.edge.grpc_channels import Channels
from rollout_server.edge.metrics.observer import MetricsObserver
from rollout_server.edge.metrics.server import serve_metrics
from rollout_server.edge.model_keys import ModelKeys
from rollout_server.edge.rpc.agent_service import AgentService
from rollout_server.edge.rpc.listener import RpcSettings
from rollout_server.edge.rpc.server import CallRouter, RpcServer
from rollout_server.edge.rpc.service import RolloutService
from rollout_server.edge.rpc.sockets import own_socket
from rollout_server.edge.rpc.tls import ClientTls
from rollout_server.edge.rpc.train_service import TrainerService
from rollout_server.edge.stream.dispatcher import Dispatcher
from rollout_server.edge.stream.streams import Streams
from rollout_server.edge.targets.host_port import url_host
from rollout_server.edge.targets.resolver import CheckedLookup
from rollout_server.edge.targets.rules import TargetRules
from rollout_server.edge.tokens.cache import Tokenizers, later_system
from rollout_server.network_exposure import log_exposure
from rollout_server.runtime.aio.collector import collector_paused
from rollout_server.runtime.aio.loop_watchdog import LoopLag, LoopWatch
from rollout_server.runtime.capture.endpoint import ModelAccess
from rollout_server.runtime.groups.registry import GroupRegistry
from rollout_server.runtime.registry.dependencies import Observers, RegistryDependencies
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.run.lifecycle import list_toolsets, start_agents
from rollout_server.runtime.run.tracer import NoTracer
from rollout_server.runtime.tools.toolsets import Toolsets
from rollout_server.settings import Settings

if TYPE_CHECKING:
    from rollout_server.embedded_gateway import EmbeddedGateway
    from rollout_server.workers.worker import Worker

_log = logging.getLogger(__name__)
LAST_SECONDS = 5.0
"""Seconds, at shutdown, in which trainers may acknowledge the outcomes that are still unacknowledged on their streams."""
SWITCH_SECONDS = 0.0005
"""Seconds for which a thread may hold the interpreter lock (GIL) while another thread waits for it.

The event loop releases the GIL in each system call. With Python's default of 5 ms it would then wait, again and again, for threads
that render whole conversations. Hundreds of sends and receives in one iteration of the loop would add up to seconds.
"""
COLLECTOR_THRESHOLDS = (10_000, 20, 20)
"""Rollouts are many objects that live long. With Python's thresholds, looking for cycles in them takes a quarter of the CPU."""
_ON_THIS_MACHINE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
KEYS_SECONDS = 1.0
"""Interval in seconds at which the file of API keys is checked for changes."""


class Server:
    """The whole service as an async context manager: `async with Server([agent], settings) as server: ...`.

    Attributes:
        grpc_port: the port of gRPC, once started; differs from the setting if that is 0.
        http_port: the port of HTTP, once started; 0 without HTTP.

    `worker` is the place among several servers of one service. Without one, this is a server of its own, whatever
    `settings.workers` is.
    """

    def __init__(self, agents: Sequence[Agent], settings: Settings, worker: Worker | None = None) -> None:
        self.settings = settings
        self._worker = worker
        self.grpc_port = 0
        self.http_port = 0
        self.address = ""
        """The gRPC address for clients inside this process: the server's Unix socket. Empty until the server has started."""
        self._agents = agents
        self._stack = AsyncExitStack()
        self._registry: RolloutRegistry
        self._streams: Streams
        self._rpcs: list[RpcServer] = []
        self._http: EmbeddedGateway | None = None
        self._metrics = MetricsObserver()
        self._model_keys = ModelKeys() if worker is None else ModelKeys(worker.secret)
        self._tokenizers = Tokenizers(tokenizer_settings(settings))

    async def __aenter__(self) -> Self:
        """Start the server.

        Raises:
            RuntimeError, OSError: if a port cannot be opened.
            AgentFailed: if an agent's `start` raises.
            WrongSettings: if a setting cannot be used, for example a certificate file that is missing.
        """
        try:
            await self._start()
        except BaseException:
            if self.grpc_port:  # callers may have started rollouts before it failed
                await self._registry.drain(0)
                await self._streams.drain(0)
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the rollouts that still run, as interrupted, and stop."""
        await self._registry.drain(0)
        await self._streams.drain(LAST_SECONDS)
        await self._stack.aclose()

    def exposition(self) -> bytes:
        """Return the metrics in the Prometheus text format; those of a worker with its gateway's."""
        own = self._metrics.exposition()
        if self._worker is None or self._http is None:
            return own
        return own.rstrip(b"\n") + b"\n" + self._http.http_metrics()

    async def drain(self) -> None:
        """Drain: report NOT_SERVING, refuse new rollouts, and wait `drain_seconds` for the running ones."""
        for rpc in self._rpcs:
            await rpc.say_not_serving()
        await self._registry.drain(self.settings.drain_seconds)
        await self._streams.drain(LAST_SECONDS)
        if self._worker is not None:
            await self._worker.leave()

    async def _start(self) -> None:
        settings = self.settings
        # `_stack` closes in reverse order: HTTP stops first, then gRPC, then the clients and tools, and the agents last.
        keys, rules, tls = keyring(settings), target_rules(settings), server_tls(settings)
        http_key = synchronous_key(settings, keys, "" if self._worker is None else self._worker.gateway_key)
        await start_agents(self._agents, self._stack)
        self._registry = await self._make_registry(rules, keys)
        groups = GroupRegistry(self._registry)
        with naming_journal(), collector_paused():
            await groups.load(self._streams.restore)
        facts = server_facts(settings, rules, keys, self._registry.journal)
        service = RolloutService(self._registry, groups, facts, self._tokenizers)
        dispatcher = Dispatcher(self._registry, self._streams, facts.violations, self._metrics.families.ignored.inc)
        agents = AgentService(self._registry, self._model_keys, self._tokenizers, self._metrics.count_model_call)

        def rpc_server(addresses: Sequence[str], router: CallRouter | None = None) -> RpcServer:
            most, total = settings.max_request_bytes + 1024 * 1024, self._registry.capacity.total
            listening = RpcSettings(addresses, most, tls, total, shares_port=router is not None)
            return RpcServer(service, listening, keys.caller, TrainerService(dispatcher), agents, router)

        await self._start_rpc(rpc_server)
        if settings.http:
            await self._start_http(http_key)
        if self._worker is not None:
            await self._worker.open_metrics(settings.host)
        # Not before the ports are open: if one cannot be opened, nothing has run and nothing was sent.
        self._streams.resume_restored()
        await groups.resume()
        self._repeat(self._registry.forget, settings.cleanup_seconds)

        def refresh_keys() -> None:
            keys.refresh(self._end_revoked)

        self._repeat(refresh_keys, KEYS_SECONDS)
        log_exposure(settings, keys)
        self._watch_loop()  # last: while the server starts, a blocked event loop delays no request

    async def _start_rpc(self, make: Callable[[Sequence[str], CallRouter | None], RpcServer]) -> None:
        """Listen on the Unix socket and on the public port.

        A worker has a server for each: over the socket come calls that are for its own rollouts, and the public port is opened
        once all workers can be reached.
        """
        public, worker = f"{url_host(self.settings.host)}:{self.settings.grpc_port}", self._worker
        path = self._stack.enter_context(own_socket()) if worker is None else worker.socket
        self.address = f"unix:{path}"
        if worker is None:
            _, self.grpc_port = await self._open_rpc(make((self.address, public), None))
            return
        own = make((self.address,), None)
        await self._open_rpc(own)
        self.grpc_port = self.settings.grpc_port  # calls of other workers may come from now on
        agents = [agent.name for agent in self._agents]
        server_id, count = self._registry.journal.server_id, self._streams.__len__
        joined = worker.joined(own.local_channel, server_id, agents, self.exposition, count)
        await self._stack.enter_async_context(joined)
        await self._open_rpc(make((public,), worker.router))

    async def _open_rpc(self, rpc: RpcServer) -> Sequence[int]:
        ports = await rpc.start()
        self._rpcs.append(rpc)
        self._stack.push_async_callback(rpc.stop, 1.0)
        return ports

    def _end_revoked(self) -> None:
        for rpc in self._rpcs:
            rpc.open_calls.end_revoked()

    async def _make_registry(self, rules: TargetRules, keys: Keyring) -> RolloutRegistry:
        settings, stack = self.settings, self._stack
        tokenizers = self._tokenizers
        stack.push_async_callback(tokenizers.close)
        await tokenizers.load_named()
        lookup = CheckedLookup(rules)
        stack.push_async_callback(lookup.close)
        client = await asyncio.to_thread(http_client, lookup, settings)  # in a thread: it reads certificate files
        stack.push_async_callback(client.close)
        channels = Channels(lookup, ClientTls(settings.target_ca))
        stack.push_async_callback(channels.close)
        connector = toolset_connector(lookup, channels, settings)
        tools = tool_resources(tokenizers, settings, connector, self._metrics.observe_toolset)
        stack.push_async_callback(tools.close)
        await list_toolsets(self._agents, tools.toolsets)
        journal = await open_journal(settings, stack)
        metrics, self._streams, tracing = self._metrics, make_streams(settings, journal.server_id), tracing_of_process()
        if tracing is not None:
            stack.callback(tracing.close)
        samplers = trainers(client, channels, tokenizers, self._streams, settings)
        registry = make_registry(
            self._agents,
            samplers,
            settings,
            RegistryDependencies(
                observer=metrics if tracing is None else Observers(metrics, tracing),
                reporter=reporter(client, channels, settings),
                retry_policy=delivery_retry_policy(settings),
                tool_resources=tools,
                models=further_models(samplers.engines, rules, settings),
                model_access=self._model_access,
                later_system=partial(later_system, tokenizers),
                count_tool=metrics.count_tool_call,
                journal=journal,
                resume_by_default=settings.on_interrupt == "resume",
                tracer=tracing or NoTracer(),
            ),
            shared=keys.demands,
        )
        if tracing is not None and tracing.meters is not None:
            tracing.meters.watch(registry)
        self._watch_metrics(registry, tools.toolsets)
        return registry

    def _watch_metrics(self, registry: RolloutRegistry, toolsets: Toolsets) -> None:
        """Fill the metrics that are read when they are asked for, and open their port if they have one."""
        settings, stack, metrics = self.settings, self._stack, self._metrics
        metrics.watch_registry(registry)
        metrics.watch("trainer_streams", "Trainer streams, disconnected ones included.", self._streams.__len__)
        metrics.watch("deliveries_pending", "Outcomes not acknowledged yet.", lambda: registry.owed)
        metrics.watch("toolset_sessions", "Sessions with toolsets.", lambda: toolsets.sessions)
        metrics.watch("journal_failing", "1 while the journal refuses commits.", lambda: bool(registry.journal.problem))
        lag = LoopLag(metrics.families.loop_lag.observe)
        lag.start()
        stack.push_async_callback(lag.stop)
        if settings.metrics_port is not None:
            port = serve_metrics(metrics, settings.metrics_port, settings.host)
            stack.push_async_callback(port.stop)

    def _model_access(self, uid: str) -> ModelAccess:
        """Return the access to a rollout's model endpoint. Without a public URL it is that of this process's HTTP port."""
        settings, url = self.settings, self.settings.public_url or ""
        if not url and self.http_port:
            host = _ON_THIS_MACHINE.get(settings.host, settings.host)
            scheme = "http" if settings.tls_cert is None else "https"
            url = f"{scheme}://{url_host(host)}:{self.http_port}"
        return ModelAccess(f"{url.rstrip('/')}/r/{uid}", self._model_keys.key(uid))

    def _watch_loop(self) -> None:
        if self.settings.loop_block_seconds:
            watch = LoopWatch(self.settings.loop_block_seconds)
            watch.start()
            self._stack.callback(watch.stop)

    def _repeat(self, work: Callable[[], None], seconds: float) -> None:
        task = asyncio.create_task(_forever(work, seconds), name=f"repeat {work.__name__}")
        self._stack.callback(task.cancel)

    async def _start_http(self, key: str) -> None:
        from rollout_gateway.certificate_files import KeyPair
        from rollout_gateway.http.protocol import ConnectionLimits
        from rollout_gateway.http.serve import Listening
        from rollout_gateway.settings import GatewaySettings

        from rollout_server.embedded_gateway import EmbeddedGateway  # imports FastAPI, which only HTTP needs

        settings, worker = self.settings, self._worker
        tls = KeyPair.of(settings.tls_cert, settings.tls_key)
        gateway = GatewaySettings(
            detach_grace_seconds=settings.detach_grace_seconds,
            max_body_bytes=settings.max_request_bytes,
            max_metadata_bytes=settings.max_metadata_bytes,
            synchronous_key=key,
        )
        limits = ConnectionLimits(connections=settings.max_connections)
        listening = Listening(
            settings.host, settings.http_port, tls, settings.tls_client_ca, limits, shares_port=worker is not None
        )
        target, page = (self._rpcs[0].local_channel, None) if worker is None else (worker.fleet, worker.page)
        self._http = EmbeddedGateway(target, listening, gateway, self._metrics.exposition, page)
        self.http_port = await self._http.start()
        self._stack.push_async_callback(self._http.stop)


def tune_interpreter() -> None:
    """Set up Python for a process that only serves."""
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


async def _forever(work: Callable[[], None], seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            work()
        except Exception:
            # The task must survive: if it ended, revoked keys would stay valid and finished rollouts would never be dropped.
            _log.exception("%s failed; the server retries it in %g s", work.__name__, seconds)
