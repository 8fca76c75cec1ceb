"""Logging as text for people or as JSON lines. A line has ids and turns, never message contents, tokens or keys."""

from __future__ import annotations

import logging
import sys
from typing import Literal

from pythonjsonlogger.json import JsonFormatter

from rollout_server.inspection.escape import visible, visible_lines

_IDS = ("worker", "rollout_uid", "rollout_id", "turn", "request_id")


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        found = ((name, getattr(record, name, None)) for name in _IDS)
        ids = " ".join(f"{name}={visible(str(value))}" for name, value in found if value is not None)
        text = visible_lines(super().format(record))
        return f"{text} [{ids}]" if ids else text


def set_up(log_format: Literal["text", "json"], level: str, worker: int | None = None) -> None:
    """Configure the root logger to write to standard error.

    Args:
        log_format: "text", or "json" for one JSON object on each line.
        level: the least severe level that is written, in any case: "debug", "info", "warning" or "error".
        worker: number of this process among several that log to the same place; each line has it.
    """
    handler = logging.StreamHandler(sys.stderr)
    if worker is not None:

        def name_worker(record: logging.LogRecord) -> bool:
            record.worker = worker
            return True

        handler.addFilter(name_worker)
    if log_format == "json":
        names = {"asctime": "time", "levelname": "level", "name": "logger"}
        handler.setFormatter(JsonFormatter("{asctime}{levelname}{name}{message}", style="{", rename_fields=names))
    else:
        handler.setFormatter(_TextFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_drops_header_lines)
    for noisy in (
        "grpc",
        "httpx",
        "httpcore",
        "uvicorn.error",
        "uvicorn.access",
        "asyncio",
        "filelock",
        "urllib3",
        "mcp",
    ):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _drops_header_lines(record: logging.LogRecord) -> bool:
    """Drop gRPC's line about a header that is not UTF-8: it contains the header's bytes, which may be an API key."""
    return not str(record.msg).startswith("Invalid encoding")
