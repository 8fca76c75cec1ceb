"""`serve_agent_loop`: the whole service for one agent loop, until it is told to stop."""

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
"""All that may be called at all, loopback included: the earlier SDK's trainers often run on the machine of the agent."""


class ServeError(Exception):
    """The service cannot be started this way."""


class ServeOptions(TypedDict, total=False):
    """What `serve_agent_loop` takes by name only.

    log_level: "debug", "info", "warning" or "error".
    reload: not here: `rollout serve FILE.py:OBJECT --reload` restarts the service when a file changes.
    settings: as in `create_app`.
    api_key: demanded of callers; without one the service is open to whoever reaches it.
    local_debug: no key is demanded, whatever `api_key` says. Not for production.
    debug_dir: `log_event` writes into `DIRECTORY/SECONDS_SINCE_1970/`.
    skip_register: this server never registers with a platform.
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
    """Serves the loop over HTTP and gRPC until SIGTERM or Ctrl-C. Raises `AgentLoopValidationError` or `ServeError`.

    As in the earlier SDK, by default other machines reach it, and it calls trainers anywhere, on this machine too; ROLLOUT_TARGETS
    limits that.
    """
    check_options("serve_agent_loop", options, ServeOptions)
    from rollout_server import app  # gRPC takes its time
    from rollout_server.sdk.server.app import settings_fields
    from rollout_server.settings import load

    if options.get("reload"):
        raise ServeError("reload: use `rollout serve FILE.py:OBJECT --reload`, which restarts the whole service")
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
    app.serve(as_agent(agent_loop, debug_dir=directory), host=host, http_port=port, log_level=level, **values)


def validate_and_report(agent_loop: RolloutAgentLoop, *, verbose: bool = False) -> ValidationResult:
    """Checks the loop and logs what was found; with `verbose` also that nothing was."""
    result = validate_agent_loop(agent_loop)
    for error in result.errors:
        _log.error("agent loop: %s", error)
    for warning in result.warnings:
        _log.warning("agent loop: %s", warning)
    if verbose and result:
        _log.info("agent loop %s can be served, with %d tools", result.agent_name, result.tool_count)
    return result
