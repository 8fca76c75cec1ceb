"""The server package of the earlier SDK."""

from __future__ import annotations

from rollout_server.sdk.server.api_key import generate_api_key, validate_api_key
from rollout_server.sdk.server.app import create_app
from rollout_server.sdk.server.serve import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    ServeError,
    serve_agent_loop,
    validate_and_report,
)

__all__ = [
    "DEFAULT_HOST",
    "DEFAULT_PORT",
    "ServeError",
    "create_app",
    "generate_api_key",
    "serve_agent_loop",
    "validate_and_report",
    "validate_api_key",
]
