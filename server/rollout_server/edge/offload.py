"""Parses large inputs in threads, so that they do not block the event loop.

Trainers' responses and callers' requests have separate thread pools, so neither waits for the other. The pools are small:
parsing needs memory and the GIL, which the other threads of the process need as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

_LARGE: Final = 64 * 1024
"""In bytes. Parsing a smaller input takes about as long as handing it to a thread."""

_T = TypeVar("_T")
_responses = ThreadPoolExecutor(2, thread_name_prefix="response")
_requests = ThreadPoolExecutor(2, thread_name_prefix="request")


async def offload_response(parse: Callable[[], _T], size: int) -> _T:
    """Call `parse` on `size` bytes from a trainer, a tool or an engine; in a thread if the input is large."""
    return await _offload(_responses, parse, size)


async def offload_request(parse: Callable[[], _T], size: int) -> _T:
    """Call `parse` on `size` bytes from a caller; in a thread if the input is large."""
    return await _offload(_requests, parse, size)


async def _offload(threads: ThreadPoolExecutor, parse: Callable[[], _T], size: int) -> _T:
    return await asyncio.get_running_loop().run_in_executor(threads, parse) if size > _LARGE else parse()
