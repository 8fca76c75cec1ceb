"""`create_app`: an agent loop as an ASGI application, with this project's server and gateway inside."""

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
    """What `create_app` takes by name only.

    api_key: demanded as a bearer token, or as it is, by everything but `GET /health`.
    debug_dir: where `log_event` writes, one file for each rollout.
    on_startup: awaited before the first request is taken; what it raises stops the application.
    on_shutdown: awaited when rollouts have ended.
    credentials, server_host, server_port: for registering with the earlier SDK's platform, which is not done here.
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
    """An application for any ASGI server, which speaks both HTTP dialects for this loop.

    The server starts with the application's lifespan, in its event loop, and stops with it: run it with `uvicorn`, or in tests
    with `with TestClient(app) as client:`. What is not given is read from the environment (`rollout config`). One process
    serves one application; it knows its own rollouts only.

    Args:
        agent_loop: the agent.
        max_concurrent: rollouts that run at the same time; more wait. 100 unless the environment says otherwise.
        record_ttl_seconds: how long a finished rollout is remembered. 3600 unless the environment says otherwise.
        settings: stands in for what is not given; `configure` gives it for all applications.
        options: see `AppOptions`.

    Raises TypeError or ValueError for a loop or a setting that cannot be served.
    """
    from rollout_server.sdk.server.embedded import Hooks, embed_server  # FastAPI takes its time

    check_options("create_app", options, AppOptions)
    if options.get("credentials") is not None:
        raise ValueError("credentials: this server does not register with a platform; leave them out")
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
    """The settings of this server that these name, or those that `configure` gave; none where there are neither."""
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
