"""Long work on the event loop, with pauses in which other tasks run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Final, TypeVar

_T = TypeVar("_T")
SLICE: Final = 0.003
"""Seconds for which such work may block the event loop."""


async def in_slices(items: Iterable[_T]) -> list[_T]:
    """Return items that are computed one by one, with a pause after each slice."""
    found, ends = list[_T](), time.perf_counter() + SLICE
    for item in items:
        found.append(item)
        if time.perf_counter() > ends:
            await asyncio.sleep(0)
            ends = time.perf_counter() + SLICE
    return found
