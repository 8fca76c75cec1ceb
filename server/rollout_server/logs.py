"""Logging: text for people, JSON for machines. Lines carry ids and turns, never contents, tokens or keys."""

from __future__ import annotations

import logging
import sys
from typing import Literal

from pythonjsonlogger.json import JsonFormatter

from rollout_server.inspection.escape import visible, visible_lines

_IDS = ("rollout_uid", "rollout_id", "turn", "request_id")


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        found = ((name, getattr(record, name, None)) for name in _IDS)
        ids = " ".join(f"{name}={visible(str(value))}" for name, value in found if value is not None)
        text = visible_lines(super().format(record))
        return f"{text} [{ids}]" if ids else text


def set_up(log_format: Literal["text", "json"], level: str) -> None:
    """Sends the root logger to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        names = {"asctime": "time", "levelname": "level", "name": "logger"}
        handler.setFormatter(JsonFormatter("{asctime}{levelname}{name}{message}", style="{", rename_fields=names))
    else:
        handler.setFormatter(_TextFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_drops_header_lines)
    for noisy in ("grpc", "httpx", "httpcore", "uvicorn.error", "uvicorn.access", "asyncio", "filelock", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _drops_header_lines(record: logging.LogRecord) -> bool:
    """gRPC writes the bytes of a header that is no UTF-8 into the log, and the header may hold a key."""
    return not str(record.msg).startswith("Invalid encoding")
