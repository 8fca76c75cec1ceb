"""The server and the gateway in the event loop of a host application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from rollout_gateway.app import create_app
from rollout_gateway.channel import open_channel
from rollout_gateway.settings import GatewaySettings
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_server.agent import Agent
from rollout_server.app import Server
from rollout_server.settings import Settings, load

Hook = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks of the host: before the server accepts requests, and after it has stopped."""

    on_startup: Hook | None = None
    on_shutdown: Hook | None = None


class _GatewayApp:
    """ASGI application that forwards to the gateway during the lifespan, and returns 503 outside of it."""

    def __init__(self) -> None:
        self.gateway: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self.gateway is None:
            text = "the server starts with the application's lifespan; in tests use `with TestClient(app) as client:`"
            await JSONResponse({"detail": text}, 503)(scope, receive, send)
            return
        await self.gateway(scope, receive, send)


def embed_server(agent: Agent, values: Mapping[str, object], hooks: Hooks) -> FastAPI:
    """Return an application that serves this agent during its lifespan. Raises ValueError for invalid settings.

    Routes that the host adds take precedence. The gateway handles all other requests.
    """
    # The gRPC port serves only the embedded gateway, so any free port on loopback will do.
    settings = load(**values, http=False, host="127.0.0.1", grpc_port=0)
    gateway_app = _GatewayApp()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if hooks.on_startup is not None:
                await hooks.on_startup()
            if hooks.on_shutdown is not None:
                stack.push_async_callback(hooks.on_shutdown)
            server = await stack.enter_async_context(Server([agent], settings))
            channel = await stack.enter_async_context(open_channel(server.address))
            gateway_app.gateway = create_app(channel, _gateway_settings(settings), metrics=server.exposition)
            try:
                yield
            finally:
                gateway_app.gateway = None

    app = FastAPI(title=agent.name, lifespan=lifespan, openapi_url=None)
    app.router.default = gateway_app
    return app


def _gateway_settings(settings: Settings) -> GatewaySettings:
    return GatewaySettings(
        detach_grace_seconds=settings.detach_grace_seconds,
        max_body_bytes=settings.max_request_bytes,
        max_metadata_bytes=settings.max_metadata_bytes,
    )
