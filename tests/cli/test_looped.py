"""A program's loop: gRPC stays at hand in it, whatever is collected as garbage meanwhile."""

from __future__ import annotations

import gc
import threading

import grpc
from rollout_server.edge.grpc_loop import run_loop


def pollers() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate() if "_poll_wrapper" in thread.name}


async def polled() -> tuple[set[int | None], set[int | None]]:
    """The threads that poll for gRPC while there is a channel, and once the last one is garbage."""
    channel = grpc.aio.insecure_channel("127.0.0.1:9")
    before = pollers()
    await channel.close()
    del channel
    gc.collect()
    return before, pollers()


def test_grpc_stays_until_the_loop_is_closed() -> None:
    gc.collect()  # what tests before this one left behind would keep it, too
    before, after = run_loop(polled())
    assert len(before) == 1
    assert after == before
