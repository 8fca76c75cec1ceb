"""Runs the event loop of a program that uses gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

T = TypeVar("T")


def run_loop(main: Coroutine[Any, Any, T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> T:
    """Runs a coroutine in a loop of its own, in which gRPC is at hand until the loop is closed. Raises what it raises.

    gRPC ends its poller as soon as nobody uses it any more, which is whenever the last server or channel is collected as garbage,
    in whatever thread that happens. A loop that goes on meanwhile may read from the poller's socket just as it is closed, and
    tells of an OSError in `PollerCompletionQueue._handle_events`.
    """
    from grpc.aio import init_grpc_aio, shutdown_grpc_aio

    from rollout_server.runtime.aio.event_loop import run

    with ExitStack() as stack:

        async def held() -> T:
            init_grpc_aio()
            stack.callback(shutdown_grpc_aio)
            return await main

        return run(held(), loop_factory)


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop's loop, where there is one."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
