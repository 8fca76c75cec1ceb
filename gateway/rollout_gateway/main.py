"""The gateway as a process of its own, before one or several rollout servers."""

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from rollout_gateway.app import create_app
from rollout_gateway.certificate_files import KeyPair
from rollout_gateway.channel import ChannelTls, open_channel
from rollout_gateway.http.protocol import ConnectionLimits
from rollout_gateway.http.serve import HttpListener, Listening, TlsFiles
from rollout_gateway.settings import GatewaySettings
from rollout_gateway.standalone_settings import Options

_LOG = logging.getLogger(__name__)


def run(options: Options, serving: Callable[[str, int], None]) -> None:
    """Serves until SIGTERM or Ctrl-C. `serving` is told the URL and the port once it does.

    Raises ValueError or OSError for addresses, files and ports that cannot be used.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(options, serving))


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


async def _serve(options: Options, serving: Callable[[str, int], None]) -> None:
    asked_to_stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        channels = []
        for address in options.servers:
            channels.append(open_channel(address, _towards_servers(options)))
            stack.push_async_callback(channels[-1].close)
        http = HttpListener(create_app(channels, _settings(options)), _listening(options))

        def stop() -> None:
            if asked_to_stop.is_set():
                http.hurry()
            asked_to_stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError):
                asyncio.get_running_loop().add_signal_handler(number, stop)
        port = await http.start()
        scheme = "http" if options.tls_cert is None else "https"
        host = f"[{options.host}]" if ":" in options.host else options.host
        url = f"{scheme}://{host}:{port}"
        _LOG.info("gateway on %s, before %s", url, ", ".join(options.servers))
        _LOG.info(
            "open without an API key, whatever servers demand: GET /health, /healthz, /readyz, /metrics, /docs and /openapi.json"
        )
        if options.synchronous_key.get_secret_value():
            _LOG.warning("open without an API key: POST /rollout and GET /tools, which use ROLLOUT_SYNCHRONOUS_KEY")
        serving(url, port)
        await asked_to_stop.wait()
        _LOG.info("stopping: requests may go on for %g s; a second signal ends them", options.drain_seconds)
        await http.stop()


def _settings(options: Options) -> GatewaySettings:
    return GatewaySettings(
        detach_grace_seconds=options.detach_grace_seconds,
        max_body_bytes=options.max_request_bytes,
        body_seconds=options.request_seconds,
        max_metadata_bytes=options.max_metadata_bytes,
        synchronous_key=options.synchronous_key.get_secret_value(),
    )


def _listening(options: Options) -> Listening:
    pair = _pair(options.tls_cert, options.tls_key)
    tls = TlsFiles(pair, options.client_ca) if pair is not None else None
    limits = ConnectionLimits(connections=options.max_connections, body_seconds=options.request_seconds)
    return Listening(options.host, options.port, tls, limits, grace_seconds=options.drain_seconds)


def _towards_servers(options: Options) -> ChannelTls | None:
    """None: no TLS where the address does not ask for it."""
    tls = ChannelTls(options.server_ca, _pair(options.server_cert, options.server_key), options.server_name)
    return tls if tls != ChannelTls() else None


def _pair(cert: Path | None, key: Path | None) -> KeyPair | None:
    return KeyPair(cert, key) if cert is not None and key is not None else None
