"""Parsing of large inputs in threads, so that nothing else on the event loop waits for it.

What trainers return and what callers request have threads of their own, so that neither waits for the other. There are few, since
what is parsed in them takes memory and the GIL, and the other threads of the process have work, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

_LARGE: Final = 64 * 1024
"""Bytes. Parsing less takes about as long as handing it to a thread."""

_T = TypeVar("_T")
_responses = ThreadPoolExecutor(2, thread_name_prefix="response")
_requests = ThreadPoolExecutor(2, thread_name_prefix="request")


async def offload_response(parse: Callable[[], _T], size: int) -> _T:
    """Calls `parse`, which reads `size` bytes of a trainer's, a tool's or an engine's; in a thread where they are many."""
    return await _offload(_responses, parse, size)


async def offload_request(parse: Callable[[], _T], size: int) -> _T:
    """Calls `parse`, which reads `size` bytes of a caller's; in a thread where they are many."""
    return await _offload(_requests, parse, size)


async def _offload(threads: ThreadPoolExecutor, parse: Callable[[], _T], size: int) -> _T:
    return await asyncio.get_running_loop().run_in_executor(threads, parse) if size > _LARGE else parse()
