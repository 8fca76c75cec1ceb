"""What a server exposes to other machines, and to callers without an API key."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from ipaddress import ip_address

from rollout_server.edge.api_keys import Keyring
from rollout_server.settings import Settings

_log = logging.getLogger(__name__)
_SYNCHRONOUS = "POST /rollout and GET /tools over HTTP"


def listens_on_loopback(settings: Settings) -> bool:
    """Return whether the server is reachable from this machine only."""
    return is_loopback(settings.host)


def is_loopback(host: str) -> bool:
    """Return whether a server that listens on this host is reachable from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:  # another host name may resolve to any address
        return False


def authenticates_callers(settings: Settings) -> bool:
    """Return whether every caller that can start rollouts is local, has an API key or presents a client certificate."""
    keys = (settings.api_key, settings.admin_key, settings.api_keys, settings.api_keys_file)
    has_keys = any(each is not None and each != () for each in keys)
    needs_key = settings.synchronous_needs_key or not settings.http
    return (has_keys and needs_key) or settings.tls_client_ca is not None or listens_on_loopback(settings)


def log_exposure(settings: Settings, keys: Keyring) -> None:
    """Log what is open to callers without an API key, one line each, and which targets requests may name."""
    if listens_on_loopback(settings):
        if keys.demands and settings.http and not settings.synchronous_needs_key:
            _log.warning("open without an API key on %s: %s", settings.host, _SYNCHRONOUS)
        return
    level = logging.INFO if settings.tls_client_ca is not None else logging.WARNING
    certificate = " (with a client certificate)" if settings.tls_client_ca is not None else ""
    for what in _apis_without_key(settings, keys):
        _log.log(level, "open without an API key on %s%s: %s", settings.host, certificate, what)
    for what in _always_open(settings):
        _log.info("open without an API key on %s: %s", settings.host, what)
    default = "all but loopback, link-local and cloud metadata addresses; ROLLOUT_TARGETS restricts them"
    _log.info("allowed targets: %s", ", ".join(settings.targets) or default)


def _apis_without_key(settings: Settings, keys: Keyring) -> Iterator[str]:
    if not keys.demands:
        yield "gRPC, which starts, reads and cancels rollouts; set ROLLOUT_API_KEYS_FILE to require keys"
    if not settings.http:
        return
    if not keys.demands or not settings.synchronous_needs_key:
        yield _SYNCHRONOUS
    if not keys.demands:
        yield "POST /v1/rollout/init over HTTP"
        yield "/v1/rollouts and /v1/agents over HTTP"
        yield "GET /metrics over HTTP"


def _always_open(settings: Settings) -> Iterator[str]:
    yield "health, reflection and GetServerInfo over gRPC"
    if settings.http:
        yield "GET /health, /healthz and /readyz over HTTP"
        yield "the API documentation (GET /, /docs, /openapi.json) over HTTP"
    if settings.metrics_port is not None:
        yield "GET /metrics on the port of ROLLOUT_METRICS_PORT"
