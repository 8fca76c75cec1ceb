"""`create_app`: an agent loop as an ASGI application that contains the server and its gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict, Unpack

from rollout_server.sdk.adapter import as_agent
from rollout_server.sdk.config.settings import RolloutSettings, chosen_settings
from rollout_server.sdk.core.base import RolloutAgentLoop
from rollout_server.sdk.utils import check_options

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rollout_server.sdk.server.embedded import Hook


class AppOptions(TypedDict, total=False):
    """Keyword-only arguments of `create_app`.

    api_key: required by all routes except `GET /health`, as a bearer token or bare.
    debug_dir: directory in which `log_event` writes one file per rollout.
    on_startup: awaited before the first request. An exception stops the application.
    on_shutdown: awaited when all rollouts have ended.
    credentials, server_host, server_port: for registration with the earlier SDK's platform, which is not supported.
    """

    api_key: str | None
    debug_dir: str | None
    on_startup: Hook | None
    on_shutdown: Hook | None
    credentials: object
    server_host: str | None
    server_port: int | None


def create_app(
    agent_loop: RolloutAgentLoop,
    max_concurrent: int | None = None,
    record_ttl_seconds: float | None = None,
    settings: RolloutSettings | None = None,
    **options: Unpack[AppOptions],
) -> FastAPI:
    """Return an ASGI application that serves this loop over both Osmosis HTTP APIs.

    The server starts and stops with the application's lifespan and runs in its event loop. Use `uvicorn`, or in tests
    `with TestClient(app) as client:`. Arguments that are not given are read from the environment (`rollout config`). Run a single
    worker process, because processes do not share rollouts.

    Args:
        agent_loop: the agent.
        max_concurrent: maximum of concurrent rollouts; more rollouts wait. Default: 100.
        record_ttl_seconds: seconds for which a finished rollout is kept. Default: 3600.
        settings: values for arguments that are not given. `configure` sets them for all applications.
        options: see `AppOptions`.

    Raises TypeError or ValueError for an invalid loop or setting.
    """
    from rollout_server.sdk.server.embedded import Hooks, embed_server  # imported late: FastAPI is slow to import

    check_options("create_app", options, AppOptions)
    if options.get("credentials") is not None:
        raise ValueError("credentials: this server does not register with a platform; omit them")
    agent = as_agent(agent_loop, debug_dir=options.get("debug_dir"))
    values = settings_fields(settings)
    parameters = {
        "max_running": max_concurrent,
        "record_ttl_seconds": record_ttl_seconds,
        "api_key": options.get("api_key"),
    }
    values |= {name: value for name, value in parameters.items() if value is not None}
    return embed_server(agent, values, Hooks(options.get("on_startup"), options.get("on_shutdown")))


def settings_fields(settings: RolloutSettings | None) -> dict[str, object]:
    """Return these settings, or else those of `configure`, under this server's field names; empty without either."""
    chosen = settings or chosen_settings()
    if chosen is None:
        return {}
    server, client = chosen.server, chosen.client
    return {
        "max_running": server.max_concurrent_rollouts,
        "record_ttl_seconds": server.record_ttl_seconds,
        "cleanup_seconds": server.cleanup_interval_seconds,
        "max_metadata_bytes": chosen.max_metadata_size_bytes,
        "trainer_timeout_seconds": client.timeout_seconds,
        "retries": client.max_retries,
        "delivery_retries": client.complete_rollout_retries,
        "retry_base_seconds": client.retry_base_delay,
        "retry_max_seconds": client.retry_max_delay,
    }
