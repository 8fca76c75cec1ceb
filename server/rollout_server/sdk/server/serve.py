"""`serve_agent_loop`: serve one agent loop until SIGTERM or Ctrl-C."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TypedDict, Unpack

from rollout_server.sdk.adapter import as_agent
from rollout_server.sdk.config.settings import RolloutSettings
from rollout_server.sdk.core.base import RolloutAgentLoop
from rollout_server.sdk.utils import check_options
from rollout_server.sdk.validator import ValidationResult, validate_agent_loop

_log = logging.getLogger(__name__)

DEFAULT_HOST = "0.0.0.0"
DEFAULT_PORT = 9000
ANY_TARGET = ("0.0.0.0/0", "::/0", "127.0.0.0/8", "::1")
"""All permitted targets including loopback, because trainers of the earlier SDK often run on the agent's machine."""


class ServeError(Exception):
    """The service cannot start with these options."""


class ServeOptions(TypedDict, total=False):
    """Further keyword-only arguments of `serve_agent_loop`.

    log_level: "debug", "info", "warning" or "error".
    reload: not supported; use `rollout serve FILE.py:OBJECT --reload`.
    settings: as in `create_app`.
    api_key: required from callers. Without a key, anyone who can reach the port can use the service.
    local_debug: require no key, even with `api_key`. Not for production.
    debug_dir: `log_event` writes to `DIRECTORY/UNIX_SECONDS/`.
    skip_register: ignored; this server never registers with a platform.
    """

    log_level: str
    reload: bool
    settings: RolloutSettings | None
    api_key: str | None
    local_debug: bool
    debug_dir: str | None
    skip_register: bool


def serve_agent_loop(
    agent_loop: RolloutAgentLoop,
    *,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    validate: bool = True,
    **options: Unpack[ServeOptions],
) -> None:
    """Serve the loop over HTTP and gRPC until SIGTERM or Ctrl-C.

    As in the earlier SDK, it listens on all interfaces by default and calls trainers at any address, including loopback.
    ROLLOUT_TARGETS limits the addresses.

    Args:
        agent_loop: the agent.
        host: address to listen on.
        port: HTTP port.
        validate: check the loop first.
        options: see `ServeOptions`.

    Raises `AgentLoopValidationError` for an invalid loop, `ServeError` for an unsupported option.
    """
    check_options("serve_agent_loop", options, ServeOptions)
    from rollout_server.sdk.server.app import settings_fields
    from rollout_server.serving import serve  # imported late: gRPC is slow to import
    from rollout_server.settings import load

    if options.get("reload"):
        raise ServeError("reload is not supported; use `rollout serve FILE.py:OBJECT --reload`")
    if validate:
        validate_and_report(agent_loop).raise_if_invalid()
    directory = options.get("debug_dir")
    if directory:
        directory = str(Path(directory) / str(int(time.time())))
    values = settings_fields(options.get("settings"))
    if not options.get("local_debug") and options.get("api_key"):
        values["api_key"] = options["api_key"]
    if "targets" not in values and not load(**values).targets:
        values["targets"] = ANY_TARGET
    level = options.get("log_level", "info").lower()
    serve(as_agent(agent_loop, debug_dir=directory), host=host, http_port=port, log_level=level, **values)


def validate_and_report(agent_loop: RolloutAgentLoop, *, verbose: bool = False) -> ValidationResult:
    """Validate the loop and log errors and warnings; with `verbose` also log success."""
    result = validate_agent_loop(agent_loop)
    for error in result.errors:
        _log.error("agent loop: %s", error)
    for warning in result.warnings:
        _log.warning("agent loop: %s", warning)
    if verbose and result:
        _log.info("agent loop %s is valid, with %d tools", result.agent_name, result.tool_count)
    return result
