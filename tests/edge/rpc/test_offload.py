"""Large inputs are parsed in threads."""

from __future__ import annotations

import asyncio
import threading

from rollout_server.edge.offload import offload_request, offload_response

LARGE = 64 * 1024 + 1


async def test_small_inputs_are_parsed_where_they_are_and_large_ones_in_a_thread() -> None:
    here = threading.current_thread()
    for offload in (offload_request, offload_response):
        assert await offload(threading.current_thread, LARGE - 1) is here
        assert await offload(threading.current_thread, LARGE) is not here


async def test_requests_do_not_wait_for_responses() -> None:
    free = threading.Event()
    responses = [asyncio.create_task(offload_response(free.wait, LARGE)) for _ in range(8)]
    try:
        await asyncio.sleep(0)
        assert await asyncio.wait_for(offload_request(lambda: "parsed", LARGE), 10) == "parsed"
        assert not any(task.done() for task in responses)
    finally:
        free.set()
        await asyncio.gather(*responses)
