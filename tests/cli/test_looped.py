"""The event loop of a program: gRPC stays loaded in it, whatever the garbage collector frees."""

from __future__ import annotations

import gc
import threading

import grpc
from rollout_server.edge.grpc_loop import run_loop


def pollers() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate() if "_poll_wrapper" in thread.name}


async def polled() -> tuple[set[int | None], set[int | None]]:
    """Count gRPC's polling threads while a channel exists, and after the last one was collected."""
    channel = grpc.aio.insecure_channel("127.0.0.1:9")
    before = pollers()
    await channel.close()
    del channel
    gc.collect()
    return before, pollers()


def test_grpc_stays_until_the_loop_is_closed() -> None:
    gc.collect()  # objects of earlier tests would keep it alive, too
    before, after = run_loop(polled())
    assert len(before) == 1
    assert after == before
