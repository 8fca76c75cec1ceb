"""Runs the event loop of a program that uses gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

T = TypeVar("T")


def run_loop(main: Coroutine[Any, Any, T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> T:
    """Run a coroutine in a new event loop and keep gRPC initialized until the loop is closed. Raise what it raises.

    By default gRPC stops its poller when its last server or channel is garbage-collected, in whatever thread that happens. A
    loop that is still running may read from the poller's socket at that moment and log an OSError from
    `PollerCompletionQueue._handle_events`.
    """
    from grpc.aio import init_grpc_aio, shutdown_grpc_aio

    from rollout_server.runtime.aio.event_loop import run

    with ExitStack() as stack:

        async def main_with_grpc() -> T:
            init_grpc_aio()
            stack.callback(shutdown_grpc_aio)
            return await main

        return run(main_with_grpc(), loop_factory)


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop type, or None if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
