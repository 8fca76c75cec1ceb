"""The HTTP gateway as a separate process, in front of one or several rollout servers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack

from rollout_gateway.app import create_app
from rollout_gateway.certificate_files import KeyPair
from rollout_gateway.channel import open_channel
from rollout_gateway.http.protocol import ConnectionLimits
from rollout_gateway.http.serve import HttpListener, Listening
from rollout_gateway.settings import GatewaySettings

from rollout_server.edge.targets.host_port import url_host
from rollout_server.runtime.aio.stop_signals import StopSignals
from rollout_server.settings.standalone_gateway import GatewayOptions

_LOG = logging.getLogger(__name__)


async def serve(options: GatewayOptions, serving: Callable[[str, int], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, and call `serving` with the URL and the port once the gateway accepts requests.

    Raises ValueError or OSError for addresses, files and ports that cannot be used.
    """
    pair = KeyPair.of(options.server_cert, options.server_key)
    async with AsyncExitStack() as stack:
        channels = []
        for address in options.servers:
            channel = open_channel(address, options.server_ca, pair, options.server_name)
            channels.append(await stack.enter_async_context(channel))
        http = HttpListener(create_app(channels, _settings(options)), _listening(options))
        signals = StopSignals()
        signals.again = http.hurry
        port = await http.start()
        scheme = "http" if options.tls_cert is None else "https"
        url = f"{scheme}://{url_host(options.host)}:{port}"
        _LOG.info("gateway serves %s for %s", url, ", ".join(options.servers))
        _LOG.info(
            "open without an API key even if servers require one: GET /, /docs, /openapi.json, /health, /healthz, /readyz, /metrics"
        )
        if options.synchronous_key.get_secret_value():
            _LOG.warning("open without an API key: POST /rollout and GET /tools, which use ROLLOUT_SYNCHRONOUS_KEY")
        serving(url, port)
        await signals.first.wait()
        _LOG.info("draining: open requests have %g s; a second signal ends them at once", options.drain_seconds)
        await http.stop()


def _settings(options: GatewayOptions) -> GatewaySettings:
    return GatewaySettings(
        detach_grace_seconds=options.detach_grace_seconds,
        max_body_bytes=options.max_request_bytes,
        body_seconds=options.request_seconds,
        max_metadata_bytes=options.max_metadata_bytes,
        synchronous_key=options.synchronous_key.get_secret_value(),
    )


def _listening(options: GatewayOptions) -> Listening:
    tls = KeyPair.of(options.tls_cert, options.tls_key)
    limits = ConnectionLimits(connections=options.max_connections, body_seconds=options.request_seconds)
    return Listening(options.host, options.port, tls, options.client_ca, limits, options.drain_seconds)
